"""Cohort: the clients hosted here, their models as one matrix, and what can be done with all of them at once.

`weights[m, d]` is never changed in place: training and mixing make a new matrix, so whatever was published stays the
snapshot of the moment it was published.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from kinfolk import kernels, randomness
from kinfolk.cohort import augment
from kinfolk.cohort.evaluation import Scores, score_chunk
from kinfolk.cohort.layout import Layout
from kinfolk.cohort.program import program_for, rounding
from kinfolk.cohort.replay import Replay
from kinfolk.cohort.training import Plan, Training, local_steps, plan, rates, train_chunk
from kinfolk.cohort.watch import Measure, Watch
from kinfolk.cohort.workers import side_by_side
from kinfolk.data.federation import Federation, Part
from kinfolk.models.vectorise import activations
from kinfolk.peers.base import Pool

# Bytes a chunk of clients may use on a CPU: the parameters, gradients and activations of a chunk are touched at every
# local step, so they should stay in the last-level cache of an ordinary machine (measured in benchmarks/training.py).
CACHE = 48 * 2**20
SHORT = 5000  # rounds times clients below which compiling for a GPU takes longer than it saves
SMALL = 10_000_000  # multiplications of a step below which one CPU thread is enough


Mixed = tuple[Tensor, Tensor, Tensor]  # ids [m], neighbors [m, k], shares [m, k]: what one mixing did


@dataclass
class Round:
    """What is known of the cohort's clients in the current round."""

    absent: Tensor  # [m] bool: not there this round (churn): neither trains nor talks
    quarantined: Tensor  # [m] bool: training gave NaN or infinity; restored, and nobody may use it
    everybody: bool = True  # nobody is absent
    evaluate: bool = False  # measure before mixing too
    before_mixing: Tensor | None = None  # [m] accuracy after training, before mixing
    edges: list[Mixed] = field(default_factory=list)  # who mixed with whom
    watch: Watch | None = None  # where to note what watched clients see


class Cohort:
    """m of the n clients of a federation.

    ids: [m] their ids; weights: [m, d] their models; initial: [d] the common w_0; data: their samples.
    """

    def __init__(
        self,
        data: Federation,
        model: nn.Module,
        training: Training,
        seed: int = 0,
        ids: Tensor | None = None,
        n: int | None = None,
        clusters: Tensor | None = None,
        device: str | torch.device = "cpu",
        precision: str = "float32",
        chunk: int | None = None,
        rounds: int | None = None,
    ) -> None:
        """`data` holds exactly the cohort's clients; `ids` are their names in the whole federation of `n` (default
        0..m-1, m); `clusters` [n] are the true clusters of all clients, for methods that are allowed to know them;
        `rounds` is how long the run will be, if it is known."""
        self.device = torch.device(device)
        self.precision = precision
        self.dtype = torch.float64 if precision == "float64" else torch.float32
        self.ids = (torch.arange(data.clients) if ids is None else ids).to(self.device)
        augment.check(training.augment, data.input_shape)
        self.data = data.to(self.device, self.dtype)
        self.clusters = data.clusters if clusters is None else clusters
        self.n = len(self) if n is None else n
        self.training = training
        self.seed = seed
        self.model = model.to(self.device, self.dtype)
        self.layout = Layout.of(self.model)
        short = rounds is not None and rounds * self.n < SHORT
        self.program, self.notice = program_for(
            self.model, self.layout, self.data.input_shape, self.device, precision, short
        )
        self.initial = self.layout.flatten(self.model)
        self.weights = self.initial.expand(len(self), -1).clone()
        self.chunk = chunk
        self._room = CACHE if self.device.type == "cpu" else torch.cuda.mem_get_info(self.device)[0] // 2
        self._activations = activations(self.model, self.data.input_shape, self.data.classes, self.dtype)
        self._train_x, self._test_x = (self.program.samples(part.x) for part in (self.data.train, self.data.test))
        self._common_x = None if self.data.common is None else self.program.samples(self.data.common.x)
        self._replay = Replay() if self.device.type == "cuda" else None
        self.begin()

    def __len__(self) -> int:
        """m"""
        return self.ids.numel()

    def fresh(self, number: int) -> Tensor:
        """Other initial weights than w_0 for the same model: [d], a function of the seed and `number`.

        Every layer with torch's `reset_parameters()` draws anew; parameters of modules that have none keep the values
        of w_0. Drawn on the CPU in float32 like w_0 itself, so that device and precision make no difference.
        """
        module = copy.deepcopy(self.model).to("cpu", torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(randomness.torch_seed(self.seed, f"init/{number}"))
            for part in module.modules():
                if callable(reset := getattr(part, "reset_parameters", None)):
                    reset()
        return self.layout.flatten(module).to(self.device, self.dtype)

    def begin(self, absent: Tensor | None = None, evaluate: bool = False, watch: Watch | None = None) -> None:
        """Start a round: who is absent, whether to measure before mixing, and where to note what is seen."""
        nobody = torch.zeros(len(self), dtype=torch.bool, device=self.device)
        away = nobody if absent is None else absent.to(self.device)
        self.round = Round(away, nobody.clone(), absent is None, evaluate, watch=watch)

    def silent(self) -> Tensor:
        """[m] Clients that offer nothing to their peers this round."""
        return self.round.absent | self.round.quarantined

    def trouble(self) -> str | None:
        """Why the local steps are launched one by one on a GPU instead of being replayed, if they are."""
        if self._replay is None or self._replay.trouble is None:
            return None
        return f"local steps cannot be recorded for this GPU, which makes small models slower: {self._replay.trouble}"

    def away(self) -> Tensor:
        """[m] Clients that are absent this round."""
        return self.round.absent

    # -- training ------------------------------------------------------------------------------------------------

    def train(self, t: int, active: Tensor | None = None) -> Tensor:
        """Every present client (of those in `active` [m], default all) trains on its own data; mean loss [m].

        A client whose model or loss is not finite afterwards is quarantined: back to where it was, excluded by its
        peers for this round (loss NaN, as for clients that did not train).
        """
        self.model.train()
        part, settings = self.data.train, self.training
        steps = local_steps(part.sizes, settings)
        if active is not None or not self.round.everybody:
            wanted = ~self.round.absent if active is None else active.to(self.device) & ~self.round.absent
            steps = torch.where(wanted.cpu(), steps, 0)
        after = self.weights.clone()
        loss = torch.full((len(self),), torch.nan, dtype=torch.float64, device=self.device)

        def work(rows: Tensor) -> None:
            here = rows.to(self.device)
            batches = plan(self.seed, t, self.ids[here], part.starts[here], part.sizes[rows], settings)
            span = _span(rows)
            block = after[here] if span is None else after[span]  # a copy, or the place itself
            with self._threads(rows.numel() * settings.batch_size), rounding(self.device, self.precision):
                mean = self._steps(block, batches, rates(batches, settings.rate(t), self.dtype))
            finite = _all_finite(block) & torch.isfinite(mean)
            if self.device.type == "cuda" or not bool(finite.all()):  # asking a GPU would make it wait
                before = self.weights[here] if span is None else self.weights[span]
                block.copy_(torch.where(finite[:, None], block, before))
                self.round.quarantined[here] = ~finite
            if span is None:
                after[here] = block
            loss[here] = mean.masked_fill(~finite, torch.nan)

        workers = self._workers(int((steps > 0).sum()), settings.batch_size)
        side_by_side(work, list(self._alike(steps, workers)), workers)
        self.weights = after
        if self.round.evaluate:
            self.round.before_mixing = self.evaluate(common=False).accuracy
        return loss

    def _steps(self, block: Tensor, batches: Plan, sizes: Tensor) -> Tensor:
        """The planned local steps on the models `block`, in place; on a GPU replayed from the third time on."""
        part = self.data.train
        x, looks = (self._train_x, []) if batches.looks is None else (part.x, [batches.looks])
        if self._replay is None:
            return train_chunk(self.program, block, x, part.y, batches, sizes, self.training)
        shares = batches.shares()

        def work(models: Tensor, index: Tensor, sizes: Tensor, *looks: Tensor) -> Tensor:
            here = Plan(index, batches.counts, shares, *looks)
            return train_chunk(self.program, models, x, part.y, here, sizes, self.training)

        key = (tuple(block.shape), batches.counts.numpy().tobytes())
        return self._replay(key, work, block, batches.index, sizes.to(self.device, non_blocking=True), *looks)

    def _alike(self, steps: Tensor, workers: int = 1) -> Iterator[Tensor]:
        """Rows [*] of the clients that have steps to take, in chunks of clients with about as many steps."""
        order = torch.argsort(steps, stable=True)
        order = order[steps[order] > 0]
        numbers = 3 * self.layout.size  # with gradient and momentum
        size = self.chunk or self._fitting(numbers, self.training.batch_size, order.numel(), workers)
        first = 0
        while first < order.numel():
            few = int(steps[order[first]])
            alike = int((steps[order[first : first + size]] <= 2 * few).sum())
            yield order[first : first + alike]
            first += alike

    def _fitting(self, numbers: int, samples: int, clients: int, workers: int) -> int:
        """How many of the clients (or models) go into a chunk, when each needs `numbers` and keeps `samples` in flight.

        Workers share the room, and each should have something to do.
        """
        inputs = self.data.train.x[:1].numel() * (1 if self.training.augment is None else 3)  # moved ones lie beside
        each = (numbers + samples * (inputs + 3 * self._activations)) * self.weights.element_size()
        return max(1, min(self._room // (workers * each), -(-clients // workers)))

    def _workers(self, clients: int, samples: int) -> int:
        """How many chunks to work on at a time: as many as torch has threads, unless a step is small."""
        threads = torch.get_num_threads() if self.device.type == "cpu" and self.program.concurrent else 1
        return 1 if clients * samples * self.layout.size < SMALL else min(threads, clients)

    @contextmanager
    def _threads(self, samples: int) -> Iterator[None]:
        """One thread for our own passes, whether chunks go side by side or there is but one: how many threads share a
        product changes its last bits, and results must not depend on who else is in the cohort. One thread for others
        on few samples: waking a second one costs more than it brings, and on a busy machine the two wait for each other
        (measured: three times slower)."""
        before = torch.get_num_threads()
        small = self.program.concurrent or samples * self.layout.size < SMALL
        single = self.device.type == "cpu" and before > 1 and small
        if single:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if single:
                torch.set_num_threads(before)

    # -- judging -------------------------------------------------------------------------------------------------

    def evaluate(self, common: bool = True) -> Scores:
        """Each client's own model on its own test set and, unless not wanted, on the one common to all if there is one.

        This is the one place that decides which models are tested.
        """
        models, rows = self.weights, torch.arange(len(self))
        scores = self._score(models, rows, rows, self.data.test, self._test_x)
        if self.data.common is None or not common:
            return scores
        everywhere = self._score(models, rows, torch.zeros_like(rows), self.data.common, self._common_x)
        return replace(scores, common=everywhere.accuracy)

    def losses(self, pool: Pool, ids: Tensor) -> Tensor:
        """Loss of pulled models on each client's own training data: ids [m, c] -> [m, c], NaN if not arrived."""
        rows = pool.rows(ids)
        if self.device.type == "cuda" and pool["weights"].shape[0]:  # asking who is there would make it wait: all pairs
            clients = torch.arange(len(self)).repeat_interleave(ids.shape[1])
            scores = self._score(pool["weights"], rows.clamp(min=0).flatten(), clients, self.data.train)
            return torch.where(rows >= 0, scores.loss.view(ids.shape), torch.nan)
        client, column = torch.nonzero(rows >= 0, as_tuple=True)
        losses = torch.full(ids.shape, torch.nan, dtype=torch.float64, device=self.device)
        if client.numel():
            scores = self._score(pool["weights"], rows[client, column], client, self.data.train)
            losses[client.to(self.device), column.to(self.device)] = scores.loss
        return losses

    def train_losses(self, models: Tensor) -> Tensor:
        """Loss of each of the models [c, d] on each client's own training data: [m, c], NaN without samples."""
        count = models.shape[0]
        clients = torch.arange(len(self)).repeat_interleave(count)
        scores = self._score(models, torch.arange(count).repeat(len(self)), clients, self.data.train)
        return scores.loss.view(len(self), count)

    def watch(
        self,
        ids: Tensor,
        similarity: Tensor,
        listed: Tensor | None,
        chosen: Tensor,
        measure: Measure,
        **own: Tensor,
    ) -> None:
        """Tell whoever watches how similar each client found the peers ids [m, c]: similarity [m, c], NaN if not seen.

        listed: [m, *] the clients' lists before, and chosen: [m, *] after. measure(cohort, pool, ids, **own) gives the
        similarity to any peers; tensors `own` [m, ...] are cut down to the clients it is called for. To be called
        before mixing. Nothing happens unless one of the clients is watched in this round.
        """
        if self.round.watch is not None:
            self.round.watch.note(self, ids, similarity, listed, chosen, measure, own)

    def _score(self, weights: Tensor, models: Tensor, clients: Tensor, part: Part, x: Tensor | None = None) -> Scores:
        """Model weights[models[i]] on the samples of client row clients[i], for every i.

        x: the samples of the part, prepared; by default those of the training part.
        """
        x = self._train_x if x is None else x
        self.model.eval()
        width = max(1, min(int(part.sizes.max()), 1024))
        workers = self._workers(models.numel(), width)
        size = self._fitting(self.layout.size, width, models.numel(), workers)

        def work(first: int) -> Scores:
            which, whose = models[first : first + size], clients[first : first + size]
            block = weights[which.to(weights.device)]
            starts, sizes = part.starts[whose.to(self.device)], part.sizes[whose]
            with self._threads(which.numel() * width), rounding(self.device, self.precision):
                return score_chunk(self.program, block, x, part.y, starts, sizes, width)

        pieces = side_by_side(work, range(0, models.numel(), size), workers)
        return Scores(torch.cat([p.loss for p in pieces]), torch.cat([p.accuracy for p in pieces]))

    # -- mixing --------------------------------------------------------------------------------------------------

    def mix(
        self,
        pool: Pool,
        ids: Tensor,
        coefficients: Tensor | None = None,
        own: Tensor | float = 1.0,
        record: bool = True,
    ) -> None:
        """Replace each model by a weighted mean of itself and the pulled models that arrived.

        ids: [m, k], -1 for none; coefficients: [m, k] and own: [m] (default all equal). The weights of those who
        answered are scaled to sum to one; a client with nothing to mix keeps its model. `record=False` keeps it out of
        the graph of who mixed with whom, for methods in which nobody chose anybody.
        """
        rows = pool.rows(ids)
        shares = torch.ones(ids.shape, dtype=torch.float64, device=self.device)
        if coefficients is not None:
            shares = coefficients.to(torch.float64)
        shares = torch.where(rows >= 0, shares, 0.0)
        mine = torch.ones(len(self), dtype=torch.float64, device=self.device) * own
        total = mine + shares.sum(dim=1)
        alone = (total <= 0) | self.round.absent
        shares = torch.where(alone[:, None], 0.0, shares / total[:, None])
        mine = torch.where(alone, 1.0, mine / total)
        self.weights = self._blend(pool["weights"], rows, shares, mine)
        if not record:
            return
        self.round.edges.append((self.ids, ids, shares))

    def _blend(self, theirs: Tensor, rows: Tensor, shares: Tensor, mine: Tensor) -> Tensor:
        shares, mine = shares.to(self.dtype), mine.to(self.dtype)
        if self.weights.is_cuda and self.dtype == torch.float32 and theirs.shape[0] and kernels.available():
            from kinfolk.kernels.blend import blend as fused

            return fused(self.weights, theirs, rows, shares, mine)
        mixed = torch.empty_like(self.weights)
        gaps = bool((rows < 0).any())
        size = max(1, CACHE // (16 * self.layout.size * mixed.element_size())) if self.device.type == "cpu" else 2**10
        columns = rows.shape[1] if theirs.shape[0] else 0
        for first in range(0, len(self), size):
            piece = slice(first, first + size)
            mixed[piece] = self.weights[piece] * mine[piece, None]
            for column in range(columns):  # in the order of the list: the sum does not depend on shards
                their = theirs[rows[piece, column].clamp(min=0)]
                if gaps:  # whatever lies in the row that stands in for a missing one must not count, not even times 0
                    their = their.masked_fill(rows[piece, column, None] < 0, 0.0)
                mixed[piece].addcmul_(their, shares[piece, column, None])
        return mixed

    def adopt(self, model: Tensor) -> None:
        """Every present client takes over `model` ([d] for all, or [m, d])."""
        self.weights = torch.where(
            self.round.absent[:, None], self.weights, model.to(self.dtype).expand_as(self.weights)
        )


def _span(rows: Tensor) -> slice | None:
    """The rows as a slice, if they follow one another."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 == rows.numel() and bool((rows[1:] > rows[:-1]).all()):
        return slice(first, last + 1)
    return None


def _all_finite(block: Tensor) -> Tensor:
    """[m] whether a row holds neither NaN nor infinity."""
    if block.is_cuda:
        return torch.isfinite(torch.linalg.vector_norm(block, torch.inf, dim=1))
    return torch.isfinite(block.amax(dim=1)) & torch.isfinite(block.amin(dim=1))  # eleven times faster there


def initial_model(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module with the seed's initial weights, the same for every method; torch's own generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.torch_seed(seed, "init"))
        return make()
