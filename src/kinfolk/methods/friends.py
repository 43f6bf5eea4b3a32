"""AFIND's choice of peers: whoever's data pull my model the way mine do, as many of them as are sure enough.

A client that chooses others sends them its model before training. Each of them answers with the cosine between the two
gradients in the last layer of the body, at that model, one on its own data and one on the asker's; and, where the
contribution of a peer is judged on the peer's data, with the loss there. Everybody publishes whom it has chosen, and
finds among those it can reach who has chosen it. Where being reached does not mean reaching, a peer that cannot reach
back gives no answer and is not observed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kinfolk import randomness
from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.judging import Look
from kinfolk.cohort.noise import Noise
from kinfolk.errors import UserError
from kinfolk.matching import friendly, lists
from kinfolk.matching.similarity import cosines
from kinfolk.methods.backbone import Backbone
from kinfolk.methods.choice import Chosen, Memory, Weighed, nothing
from kinfolk.peers.base import Peers, Pool
from kinfolk.settings import setting

MOST = 2000  # clients: a run keeps and sends tables of n² numbers, 32 MB each there
PIECE = 2**24  # numbers of proxies that noise is put on at a time
SMALLEST = 1e-30  # length of a proxy below which it points nowhere


@dataclass(frozen=True)
class Taste:
    """Who is a friend: what every method that chooses as AFIND does can be told."""

    preset: Literal["paper", "robust"] = setting("robust", "as printed, or with what made choosing reliable")
    proxy: Literal["grad", "weight", "delta"] = setting(
        "grad", "compared in the last layer of the body: gradients at one model, weights, or this round's updates"
    )
    nu: float = setting(0.1, "temperature of the probabilities", gt=0)
    sim_memory: float | None = setting(
        None, "share of the past in the running average of similarities; none: preset", ge=0, lt=1
    )
    threshold: friendly.Threshold = setting(
        "calibrated", "calibrated: in units of the uniform probability; literal, remark: as printed; top: a fixed count"
    )
    tau: float = setting(0.5, "factor on the threshold: larger means fewer friends", gt=0)
    count: int = setting(10, "friends in every round (threshold top)", ge=1, peers={"threshold": "top"})
    entropy: friendly.Entropy | None = setting(
        None, "printed: opposite gradients count as certain again; monotone: they do not; none: preset"
    )
    explore: float | None = setting(None, "probability of adding one random peer in a round; none: preset", ge=0, le=1)
    self_in_agg: bool = setting(True, "a client's own model counts in its average")
    noise: float = setting(0.0, "Gaussian noise in multiples of noise_clip / batch size; no privacy", ge=0)
    noise_on: Literal["proxy", "training"] = setting(
        "proxy", "proxy: noise on what peers answer with; training: on the gradient of every local step"
    )
    noise_clip: float = setting(1.0, "length that a proxy or gradient is cut to before noise is added", gt=0)

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"sim_memory": 0.0, "entropy": "printed", "explore": 0.0},
        "robust": {"sim_memory": 0.9, "entropy": "monotone", "explore": 0.0},
    }

    def __post_init__(self) -> None:
        for name, value in self.presets[self.preset].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


@dataclass(frozen=True)
class Contribution(Taste):
    """And what a friend's model is worth."""

    temperature: float = setting(1.0, "of the weights exp(-loss / temperature)", gt=0)
    loss_direction: Literal["theirs", "mine"] | None = setting(
        None, "theirs: my model on the peer's data, as printed; mine: the peer's model on my data; none: preset"
    )
    loss_smoothing: Literal["two-point", "ema"] = setting(
        "two-point", "two-point: with the loss before training; ema: with that of the rounds before"
    )
    gamma: float = setting(0.9, "share of the earlier loss in the smoothed one", ge=0, le=1)

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": Taste.presets["paper"] | {"loss_direction": "theirs"},
        # A stranger does no harm where it counts by its loss; with equal weights it does.
        "robust": Taste.presets["robust"] | {"loss_direction": "mine", "explore": 1.0},
    }


@dataclass(frozen=True)
class _Known:
    """What is known when training begins."""

    look: Look
    probability: Tensor  # [m, n]
    fallback: Tensor  # [m] bool: nobody passed the threshold
    askers: Tensor  # [m, r] ids of those who have chosen me
    cosine: Tensor  # [m, r] between the gradients at an asker's model (proxy grad)
    loss: Tensor  # on my data before training: [m, r] of the askers' models, or [m, k] of those of my chosen
    own: Tensor  # [m] of my own
    layer: Tensor  # [m, c] my own proxy layer


@dataclass(frozen=True)
class Friends:
    """The choice itself. A contribution says how much each friend counts; for a mere taste all are alike."""

    taste: Taste
    backbone: Backbone

    @property
    def gradients(self) -> bool:
        """Whether peers compare gradients at my model with mine."""
        return self.taste.proxy == "grad"

    @property
    def disturbed(self) -> bool:
        """Whether there is noise on proxies."""
        return self.taste.noise > 0 and self.taste.noise_on == "proxy"

    @property
    def worth(self) -> Contribution | None:
        return self.taste if isinstance(self.taste, Contribution) else None

    @property
    def theirs(self) -> bool:
        """Whether peers judge my model on their data, and not I theirs on mine."""
        return self.worth is not None and self.worth.loss_direction == "theirs"

    @property
    def early(self) -> bool:
        """Whether losses before training count."""
        return self.worth is not None and self.worth.loss_smoothing == "two-point" and self.worth.gamma > 0

    @property
    def exchanges(self) -> int:
        """How often in a round models are sent."""
        return 2 if self.gradients or self.early else 1

    def start(self, cohort: Cohort) -> dict[str, Tensor]:
        if cohort.n > MOST:
            raise UserError(f"AFIND remembers every pair of clients: {cohort.n} clients are more than {MOST}")
        _ = cohort.division  # refuses a model without a body
        if self.taste.noise and self.taste.noise_on == "training":
            cohort.noise = Noise(self.taste.noise_clip, self._deviation(cohort))
        return nothing(cohort, cohort.n)

    def before(self, t: int, cohort: Cohort, memory: Memory, peers: Peers) -> Chosen:
        unknown = (memory.probability == 0).all(dim=1, keepdim=True)  # before round 1
        probability = torch.where(unknown, friendly.uniform(peers.reachable(0)), memory.probability)
        wanted, fallback = self._wanted(t, cohort, probability, memory.threshold, peers)
        ids = lists.pack(wanted, _everybody(cohort))
        look = Look.of(cohort, t, self.backbone.head(cohort))
        own, slope = self._slope(look)
        peers.publish(t, body=cohort.weights, slope=slope, who=cohort.ids, asks=wanted.to(torch.uint8))
        askers = _askers(t, cohort, peers)
        judged = askers if self.theirs else ids
        pool = peers.pull(t, self._met(askers, judged), ("body", "slope", "who"))
        loss = cosine = torch.full(askers.shape, torch.nan, dtype=torch.float64, device=cohort.device)
        if self.gradients:
            loss, cosine = _over_pairs(cohort, pool, askers, partial(self._alignments, t, look, pool))
            cosine = torch.where(torch.isfinite(loss), cosine, torch.nan)
        if self.early and not (self.gradients and self.theirs):
            (loss,) = _over_pairs(cohort, pool, judged, partial(look.losses, pool["body"]))
        layer = cohort.weights[:, cohort.division.proxy]
        return Chosen(ids, _Known(look, probability, fallback, askers, cosine, loss, own, layer))

    def after(self, t: int, cohort: Cohort, memory: Memory, peers: Peers, chosen: Chosen, pool: Pool) -> Weighed:
        ids, known = chosen.ids, chosen.seen
        loss, own = self._judged(t, cohort, peers, ids, known, pool)
        similarity = torch.full(ids.shape, torch.nan, dtype=torch.float64, device=cohort.device)
        if self.gradients or self.theirs:
            similarity, told = self._answers(t, cohort, peers, ids, known, loss)
            loss = told if self.theirs else loss
        if not self.gradients:
            similarity = self._layers(t, cohort, peers, ids, known)
        seen = friendly.spread(ids, similarity, cohort.n)
        cohort.watch(ids, similarity, memory.neighbors, ids, _noted, seen=seen)
        fields = self._learnt(memory, seen, known, peers) | {"neighbors": ids, "loss": memory.loss}
        if self.worth is None:
            return Weighed(None, float(self.taste.self_in_agg), fields)
        keep = self.worth.gamma if self.worth.loss_smoothing == "ema" else 0.0
        fields["loss"], loss, own = friendly.smoothed(memory.loss, cohort.ids, ids, loss, own, keep)
        shares, mine = friendly.boltzmann(loss, own, self.worth.temperature)
        return Weighed(shares, mine if self.taste.self_in_agg else 0.0, fields)

    # -- before training -----------------------------------------------------------------------------------------

    def _wanted(
        self, t: int, cohort: Cohort, probability: Tensor, threshold: Tensor, peers: Peers
    ) -> tuple[Tensor, Tensor]:
        """C_i as a table [m, n] bool, and where [m] nobody passed: the most probable is taken then, ties at random."""
        taste, here, everybody = self.taste, peers.reachable(t), _everybody(cohort)
        keys = randomness.bits(cohort.seed, "friends", t, cohort.ids[:, None], everybody)
        if taste.threshold == "top":
            wanted = friendly.top(probability, here, taste.count, keys)
            fallback = torch.zeros_like(here[:, 0])
        else:
            wanted = here & (probability >= threshold[:, None])
            fallback = here.any(dim=1) & ~wanted.any(dim=1)
            wanted = wanted | (fallback[:, None] & friendly.top(probability, here, 1, keys))
        if taste.explore:
            lucky = randomness.uniform(cohort.seed, "explore", t, cohort.ids, torch.zeros_like(cohort.ids))
            keys = randomness.bits(cohort.seed, "explored", t, cohort.ids[:, None], everybody)
            stranger = friendly.top(torch.zeros_like(probability), here & ~wanted, 1, keys)
            wanted = wanted | (stranger & (lucky < taste.explore)[:, None])
        return wanted, fallback

    def _slope(self, look: Look) -> tuple[Tensor, Tensor]:
        """Each client's loss [m] at its own model, and its gradient [m, c] in the proxy layer, [m, 0] if not needed."""
        cohort = look.cohort
        mine = torch.arange(len(cohort), device=cohort.device)
        if self.gradients:
            return look.slopes(cohort.weights, mine, mine, cohort.division.proxy)
        own = torch.zeros(len(cohort), dtype=torch.float64, device=cohort.device)
        return look.losses(cohort.weights, mine, mine) if self.early else own, cohort.weights[:, :0].clone()

    def _met(self, askers: Tensor, judged: Tensor) -> Tensor:
        """Whose models are needed before training, each once: [m, *]."""
        met = askers if self.gradients else askers[:, :0]
        more = judged if self.early else judged[:, :0]
        return torch.cat([met, torch.where(lists.contains(met, more), -1, more)], dim=1)

    def _alignments(self, t: int, look: Look, pool: Pool, models: Tensor, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and cosine [p] of the gradients at each asker's model: mine, with noise if wanted, and its own."""
        cohort, columns, slope = look.cohort, look.cohort.division.proxy, pool["slope"]
        if not self.disturbed:
            loss, cosine = look.alignments(pool["body"], models, clients, columns, slope)
            return loss, cosine.flatten()  # where there are no pairs, it has no shape of its own
        models, clients = models.to(cohort.device), clients.to(cohort.device)
        loss, cosine = torch.zeros_like(models, dtype=torch.float64), torch.zeros_like(models, dtype=torch.float64)
        size = max(1, PIECE // slope.shape[1])
        for first in range(0, models.numel(), size):
            piece = slice(first, first + size)
            which, whose = models[piece], clients[piece]
            loss[piece], gradient = look.slopes(pool["body"], which, whose, columns)
            pairs = cohort.ids[whose] * cohort.n + pool["who"][which]
            sent = self._noisy(t, cohort, gradient, pairs).to(torch.float64)
            cosine[piece] = cosine_similarity(sent, slope[which].to(torch.float64), eps=SMALLEST)
        return loss, cosine

    # -- after training ------------------------------------------------------------------------------------------

    def _judged(
        self, t: int, cohort: Cohort, peers: Peers, ids: Tensor, known: _Known, pool: Pool
    ) -> tuple[Tensor, Tensor]:
        """Losses on my data of the askers' models [m, r] or of my friends' [m, k], and of my own [m]; eq. 15."""
        if self.worth is None:
            return known.loss, known.own
        judged = ids
        if self.theirs:
            judged = known.askers
            pool = pool | peers.pull(t, torch.where(lists.contains(ids, judged), -1, judged))
        mine = torch.arange(len(cohort), device=cohort.device)
        (loss,) = _over_pairs(cohort, pool, judged, partial(known.look.losses, pool["weights"]))
        own = known.look.losses(cohort.weights, mine, mine)
        if not self.early:
            return loss, own
        gamma = self.worth.gamma
        return (1 - gamma) * loss + gamma * known.loss, (1 - gamma) * own + gamma * known.own

    def _answers(
        self, t: int, cohort: Cohort, peers: Peers, ids: Tensor, known: _Known, loss: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tell the askers what I have found, and hear what my friends have: cosines and losses [m, k], NaN if nothing.

        A client without samples cannot judge.
        """
        empty = (cohort.data.train.sizes == 0).to(cohort.device)[:, None]
        found = [known.cosine, loss if self.theirs else torch.full_like(known.cosine, torch.nan)]
        tables = [friendly.spread(known.askers, values.masked_fill(empty, torch.nan), cohort.n) for values in found]
        peers.publish(t, answers=torch.stack(tables, dim=2))
        pool = peers.pull(t, ids, ("answers",), facts=True)
        heard = _of_mine(cohort, pool, "answers", ids)
        return heard[..., 0], heard[..., 1]

    def _layers(self, t: int, cohort: Cohort, peers: Peers, ids: Tensor, known: _Known) -> Tensor:
        """Cosines [m, k] of the proxy layers themselves, or of what this round's training has changed in them."""
        layer = cohort.weights[:, cohort.division.proxy]
        layer = layer - known.layer if self.taste.proxy == "delta" else layer
        sent = self._noisy(t, cohort, layer, cohort.ids) if self.disturbed else layer
        peers.publish(t, layer=sent)
        pool = peers.pull(t, ids, ("layer",), facts=True)
        return cosines(layer, pool["layer"], pool.rows(ids))

    def _noisy(self, t: int, cohort: Cohort, vectors: Tensor, sender: Tensor) -> Tensor:
        return friendly.noisy(vectors, self.taste.noise_clip, self._deviation(cohort), cohort.seed, t, sender)

    def _deviation(self, cohort: Cohort) -> float:
        return self.taste.noise * self.taste.noise_clip / cohort.training.batch_size

    def _learnt(self, memory: Memory, seen: Tensor, known: _Known, peers: Peers) -> dict[str, Tensor]:
        """Similarities, probabilities and thresholds after what was seen [m, n] in this round."""
        taste = self.taste
        assert taste.sim_memory is not None  # by the preset
        assert taste.entropy is not None
        similarity = friendly.remembered(memory.similarity, seen, taste.sim_memory)
        if taste.sim_memory:
            similarity = friendly.shifted(memory.similarity, similarity, seen)
        current = torch.where(seen.isnan(), torch.nan, similarity)
        threshold = memory.threshold
        if taste.threshold != "top":
            others = peers.reachable(0).sum(dim=1)
            threshold = friendly.thresholds(threshold, current, others, taste.tau, taste.threshold, taste.entropy)
        return {
            "probability": friendly.probabilities(known.probability, current, taste.nu),
            "threshold": threshold,
            "similarity": similarity,
            "fallbacks": memory.fallbacks + known.fallback,
        }


def _everybody(cohort: Cohort) -> Tensor:
    """All ids, a row for each client: [m, n]."""
    return torch.arange(cohort.n, device=cohort.device).expand(len(cohort), -1)


def _askers(t: int, cohort: Cohort, peers: Peers) -> Tensor:
    """Who has chosen me, of those I can reach: ids [m, r]."""
    everybody = _everybody(cohort)
    around = torch.where(peers.reachable(t), everybody, -1)
    pool = peers.pull(t, around, ("asks",), facts=True)
    return lists.pack(_of_mine(cohort, pool, "asks", around) == 1, everybody)


def _over_pairs(
    cohort: Cohort, pool: Pool, ids: Tensor, work: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """As `Cohort.over_pairs`. Some are asked by many and most by few: here a GPU better waits to learn who is there."""
    rows = pool.rows(ids)
    client, column = torch.nonzero(rows >= 0, as_tuple=True)
    found = work(rows[client, column], client)
    tables = []
    for values in found if isinstance(found, tuple) else (found,):
        tables.append(torch.full(ids.shape, torch.nan, dtype=torch.float64, device=cohort.device))
        tables[-1][client, column] = values.to(torch.float64)
    return tables


def _of_mine(cohort: Cohort, pool: Pool, name: str, ids: Tensor) -> Tensor:
    """What the peers ids [m, k] have published of me in a table [p, n, ...]: [m, k, ...], NaN if it did not arrive."""
    rows, table = pool.rows(ids), pool[name]
    if not table.shape[0]:
        return torch.full((*ids.shape, *table.shape[2:]), torch.nan, dtype=torch.float64, device=cohort.device)
    found = table[rows.clamp(min=0), cohort.ids[:, None]].to(torch.float64)
    return torch.where((rows >= 0).view(*rows.shape, *[1] * (found.dim() - 2)), found, torch.nan)


def _noted(cohort: Cohort, pool: Pool, ids: Tensor, seen: Tensor) -> Tensor:
    """For whoever watches: what the clients have seen [m, n] of the peers ids [m, c]."""
    return torch.where(ids < 0, torch.nan, seen.gather(1, ids.clamp(min=0)))
