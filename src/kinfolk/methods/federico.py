"""FedeRiCo: learn with those whose models explain my data, found by trying some of them out every round.

Sui, Wen, Lau, Ross, Cresswell: Find Your Friends: Personalized Federated Learning with the Right Collaborators. 2022.
No code is public; what the paper leaves open is decided here. As a sampler (the form in which AFIND+ compares with it)
a client averages with whom it tries out. In the full form models are components of a mixture, and are never averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kinfolk import randomness
from kinfolk.cohort import judging
from kinfolk.cohort.cohort import Cohort
from kinfolk.cohort.mixing import blend
from kinfolk.errors import UserError
from kinfolk.matching import cost, friendly, lists
from kinfolk.methods import companions
from kinfolk.methods.backbone import HELP, Backbone, Kind
from kinfolk.methods.choice import Memory, nothing
from kinfolk.methods.registry import register
from kinfolk.peers.base import Peers, Pool
from kinfolk.settings import setting

MOST = 10_000  # clients: the losses of all models on everybody's data are n² numbers, 800 MB there


@register("federico")
@dataclass(frozen=True)
class FedeRiCo:
    """Every client remembers how well each peer's model did on its own data, tries out 10 each round, mostly those that
    did well, and averages with them by the exponent of their negative losses.

    Losses are means over all training samples, with a running average over the rounds. A peer whose answer did not
    arrive, or whose loss is not finite, is neither averaged with nor remembered. Form "em": a client tries out 3 peers'
    models, trains a copy of each and of its own on its data, and sends the change, times the model's share in the
    mixture that explains its data, back to its owner; it predicts with the mixture.
    """

    form: Literal["sampler", "em"] = setting("sampler", "average with those tried out; em: predict with a mixture")
    neighbors: int = setting(
        10, "peers tried out and averaged with each round (sampler)", ge=1, peers={"form": "sampler"}
    )
    components: int = setting(3, "peers' models in a client's mixture, beside its own (em)", ge=1, peers={"form": "em"})
    explore: float = setting(0.3, "probability that a peer to try out is any one, not one that did well", ge=0, le=1)
    memory: float = setting(0.6, "weight of a new loss in the running average (b)", gt=0, le=1)
    backbone: Kind | None = setting(None, HELP + "; none: alt, or full where the form is em")
    tune_epochs: int = setting(1, "epochs on the head alone (alt), or on the copy that is tested (ft)", ge=1)
    weighs = True

    def __post_init__(self) -> None:
        if self.backbone is None:
            object.__setattr__(self, "backbone", "full" if self.form == "em" else "alt")
        if self.form == "em" and self.backbone != "full":
            raise UserError("form 'em' mixes what whole models predict: it needs backbone = 'full'")

    @property
    def only_mean(self) -> str | None:
        """Why no other rule than the mean can take its place, if so."""
        return "with form 'em' never averages models" if self.form == "em" else None

    def nominal(self, rounds: int, n: int) -> cost.Cost:
        """What so many rounds cost by the formula."""
        return cost.mixture(n, self.components, rounds) if self.form == "em" else cost.gossip(n, self.neighbors, rounds)

    def start(self, cohort: Cohort) -> Memory:
        if cohort.n > MOST:
            raise UserError(f"method 'federico' remembers all pairs: {cohort.n} clients are more than {MOST}")
        self._backbone.start(cohort)
        unknown = torch.full((len(cohort), cohort.n), torch.nan, dtype=torch.float64, device=cohort.device)
        return Memory(**nothing(cohort) | {"loss": unknown})

    def step(self, t: int, cohort: Cohort, state: Memory, peers: Peers) -> Memory:
        return (self._average if self.form == "sampler" else self._mixture)(t, cohort, state, peers)

    def _average(self, t: int, cohort: Cohort, state: Memory, peers: Peers) -> Memory:
        """The sampler: weights π over those tried out and oneself."""
        tried = self.tried(t, cohort, state.loss, peers, self.neighbors)
        self._backbone.train(t, cohort)
        peers.publish(t, weights=cohort.weights)
        pool = peers.pull(t, tried)
        losses, own = self._losses(cohort, pool, tried)
        table, losses, own = friendly.smoothed(state.loss, cohort.ids, tried, losses, own, 1 - self.memory)
        shares, mine = friendly.boltzmann(losses, own, 1.0)
        self._backbone.mix(cohort, pool, tried, shares, mine)
        return Memory(**nothing(cohort) | {"loss": table, "neighbors": tried})

    def tried(self, t: int, cohort: Cohort, loss: Tensor, peers: Peers, count: int) -> Tensor:
        """[m, count] Each place is left to chance with probability `explore`; into the others come peers seen before,
        drawn one after the other with probabilities proportional to exp(-loss) [m, n]."""
        everybody = torch.arange(cohort.n, device=cohort.device).expand(loss.shape)
        clients = cohort.ids[:, None]
        luck = randomness.uniform(cohort.seed, "trying", t, clients, everybody).clamp(min=2.0**-53)
        score = torch.where(everybody == clients, torch.nan, -loss - (-luck.log()).log())  # Gumbel's: the best k
        known = lists.best(everybody, score, count)
        free = randomness.uniform(cohort.seed, "explore", t, clients, torch.arange(count, device=cohort.device))
        tried = (free >= self.explore).sum(dim=1, keepdim=True)
        rank = torch.arange(known.shape[1], device=cohort.device)
        return companions.fill(t, cohort, peers, torch.where(rank < tried, known, -1), count)

    def _losses(self, cohort: Cohort, pool: Pool, tried: Tensor) -> tuple[Tensor, Tensor]:
        """Losses of those tried out [m, k] and of one's own model [m] on all of a client's samples."""
        losses = self._backbone.losses(cohort, pool, tried)
        cohort.watch(tried, losses, None, tried, self._backbone.losses)
        rows = torch.arange(len(cohort))
        return losses, judging.score(cohort, cohort.weights, rows, rows, cohort.data.train).loss

    # -- the full form -------------------------------------------------------------------------------------------

    def _mixture(self, t: int, cohort: Cohort, state: Memory, peers: Peers) -> Memory:
        """EM: shares of the models in what explains my data, then a step of every model for all who use it."""
        peers.publish(t, weights=cohort.weights)
        tried = self.tried(t, cohort, state.loss, peers, self.components)
        pool = peers.pull(t, tried)
        losses, own = self._losses(cohort, pool, tried)
        table, prior, mine = friendly.smoothed(state.loss, cohort.ids, tried, losses, own, 1 - self.memory)
        shares, mine = friendly.boltzmann(losses + prior, own + mine, 1.0)  # π exp(-loss), π being exp(-average)
        rows = pool.rows(tried)
        cohort.round.edges.append((cohort.ids, tried, shares))
        self._maximise(t, cohort, peers, pool, tried, shares, mine)
        cohort.mixture = judging.Mixture(pool["weights"], rows, shares)
        return Memory(**nothing(cohort) | {"loss": table, "neighbors": tried})

    def _maximise(
        self, t: int, cohort: Cohort, peers: Peers, pool: Pool, tried: Tensor, shares: Tensor, mine: Tensor
    ) -> None:
        """Train copies of the models tried out and of one's own, send back the changes, and move by those received.

        No model moves farther than the mean of its trained copies, however many use it.
        """
        own = cohort.weights
        trained, _ = cohort.trained(own, t)
        step = (trained - own) * mine[:, None].to(cohort.dtype)
        changes = {
            f"change {place}": self._change(t, cohort, pool, tried[:, place], shares[:, place], place)
            for place in range(tried.shape[1])
        }
        peers.publish(t, tried=tried, shares=shares, **changes)
        around = torch.where(peers.reachable(t), torch.arange(cohort.n, device=cohort.device), -1)
        told = peers.pull(t, around, ("tried", "shares"), facts=True)
        weight = mine
        for place, name in enumerate(changes):
            askers, share = _askers(cohort, told, around, place)
            heard = peers.pull(t, askers, (name,))
            rows = heard.rows(askers)
            step = blend(step, heard[name], rows, torch.ones_like(share), torch.ones_like(mine))
            weight = weight + torch.where(rows >= 0, share, 0.0).sum(dim=1)
        moved = own + step / weight.clamp(min=1)[:, None].to(cohort.dtype)
        cohort.weights = torch.where(cohort.round.absent[:, None], own, moved)

    def _change(self, t: int, cohort: Cohort, pool: Pool, peer: Tensor, share: Tensor, place: int) -> Tensor:
        """What training on one's own data changes in the model of a peer [m], times its share [m]: [m, d]."""
        rows, models = pool.rows(peer[:, None])[:, 0], pool["weights"]
        if not models.shape[0]:
            return torch.zeros_like(cohort.weights)
        theirs = torch.where(rows[:, None] >= 0, models[rows.clamp(min=0)], cohort.weights)
        trained, _ = cohort.trained(theirs, t, rows >= 0, purpose=f"copy {place}")
        return (trained - theirs) * share[:, None].to(cohort.dtype)

    @property
    def _backbone(self) -> Backbone:
        assert self.backbone is not None  # by __post_init__
        return Backbone(self.backbone, self.tune_epochs)


def _askers(cohort: Cohort, told: Pool, around: Tensor, place: int) -> tuple[Tensor, Tensor]:
    """Who of those around [m, n] has tried my model out in this place, and with what share: [m, r] each."""
    rows, tried = told.rows(around), told["tried"]
    if not tried.shape[0]:
        return around[:, :0], told["shares"].new_zeros(len(cohort), 0)
    mine = (rows >= 0) & (tried[rows.clamp(min=0), place] == cohort.ids[:, None])
    askers = lists.pack(mine, around)
    shares = told["shares"][told.rows(askers).clamp(min=0), place]
    return askers, torch.where(askers >= 0, shares, 0.0)
