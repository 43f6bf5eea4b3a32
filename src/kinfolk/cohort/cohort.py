"""Cohort: the clients hosted here, their models as one matrix, and what can be done with all of them at once.

`weights[m, d]` is never changed in place: training and mixing make a new matrix, so whatever was published stays the
snapshot of the moment it was published.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from kinfolk import randomness
from kinfolk.cohort import augment, judging
from kinfolk.cohort.account import Account
from kinfolk.cohort.evaluation import Scores
from kinfolk.cohort.layout import Division, Layout
from kinfolk.cohort.mixing import mix
from kinfolk.cohort.noise import Noise
from kinfolk.cohort.program import program_for, rounding
from kinfolk.cohort.replay import Replay
from kinfolk.cohort.room import Room
from kinfolk.cohort.steer import Steer
from kinfolk.cohort.training import (
    Chunks,
    Frames,
    Plan,
    Training,
    all_finite,
    local_steps,
    plan,
    rates,
    train_chunk,
)
from kinfolk.cohort.watch import Measure, Watch
from kinfolk.cohort.workers import side_by_side, span_of
from kinfolk.data.federation import Federation, Part
from kinfolk.kernels.dispatch import there
from kinfolk.models.vectorise import activations
from kinfolk.peers.base import Pool

SHORT = 5000  # rounds times clients below which compiling for a GPU takes longer than it saves

Mixed = tuple[Tensor, Tensor, Tensor]  # ids [m], neighbors [m, k], shares [m, k]: what one mixing did
# pool, ids [m, k], coefficients, own, part, all as in `mix`: the new models [m, d] and the shares [m, k]
Combine = Callable[[Pool, Tensor, Tensor | None, Tensor | float, slice | None], tuple[Tensor, Tensor]]


@dataclass
class Round:
    """What is known of the cohort's clients in the current round."""

    t: int
    absent: Tensor  # [m] bool: not there this round (churn): neither trains nor talks
    quarantined: Tensor  # [m] bool: training gave NaN or infinity; restored, and nobody may use it
    withheld: Tensor | None = None  # [m] bool: has no privacy budget left to send anything
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
        shared: bool = False,
    ) -> None:
        """`data` holds exactly the cohort's clients; `ids` are their names in the whole federation of `n` (default
        0..m-1, m); `clusters` [n] are the true clusters of all clients, for methods that are allowed to know them;
        `rounds` is how long the run will be, if it is known; `shared`: all rows of `weights` are one in memory."""
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
        self.rounds = rounds
        self.model = model.to(self.device, self.dtype)
        self.layout = Layout.of(self.model)
        short = rounds is not None and rounds * self.n < SHORT
        self.program, self.notice = program_for(
            self.model, self.layout, self.data.input_shape, self.device, precision, short, training.batch_size
        )
        self.initial = self.layout.flatten(self.model)
        alike = self.initial.expand(len(self), -1)
        self.weights = alike if shared else alike.clone()
        self.personal: Tensor | None = None  # [m, d] what each client uses and is tested with, if not `weights`
        self.mixture: judging.Mixture | None = None  # models of others that each uses beside it, and is tested with
        self.combine: Combine | None = None  # in place of the weighted mean
        self.tuning = 0  # epochs of training on a copy before a test
        self.noise: Noise | None = None  # on the gradients of all training
        self.account: Account | None = None  # of what leaves the clients, if the method is private
        self.proxies = False  # `weights` are proxies of what the clients use, and tested beside it
        self.validation: Part | None = None  # set aside by a method of what to train on; x as the program reads it
        self.chunk = chunk
        inputs = self.data.train.x[:1].numel() * (1 if training.augment is None else 3)  # moved ones lie beside
        put_out = activations(self.model, self.data.input_shape, self.data.classes, self.dtype)
        kept = inputs + 3 * (self.program.outputs or put_out)
        self.room = Room(self.device, self.program.concurrent, self.layout.size, kept, self.weights.element_size())
        self.train_x, self.test_x = (self.program.samples(part.x) for part in (self.data.train, self.data.test))
        self._common_x = None if self.data.common is None else self.program.samples(self.data.common.x)
        self._replay = Replay() if self.device.type == "cuda" else None
        self._frames, self._chunks = Frames(self.device), Chunks()
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

    @cached_property
    def division(self) -> Division:
        """Which columns are the body and which the head; a mistake of the user's if the model has no such parts."""
        return self.layout.divide(self.model)

    def begin(
        self, absent: Tensor | None = None, evaluate: bool = False, watch: Watch | None = None, t: int = 1
    ) -> None:
        """Start round t: who is absent, whether to measure before mixing, and where to note what is seen."""
        nobody = torch.zeros(len(self), dtype=torch.bool, device=self.device)
        away = nobody if absent is None else absent.to(self.device)
        self.round = Round(t, away, nobody.clone(), everybody=absent is None, evaluate=evaluate, watch=watch)

    def silent(self) -> Tensor:
        """[m] Clients that offer nothing to their peers this round."""
        silent = self.round.absent | self.round.quarantined
        return silent if self.round.withheld is None else silent | self.round.withheld

    def trouble(self) -> str | None:
        """Why local steps, or some of them, are launched one by one on a GPU instead of being replayed, if they are."""
        if self._replay is None:
            return None
        why, costs = self._replay.trouble, "which makes small models slower"
        if why is not None:
            return f"local steps cannot be recorded for this GPU, {costs}: {why}"
        why = self._replay.crowded
        return None if why is None else f"not all local steps are recorded for this GPU, {costs}: {why}"

    def away(self) -> Tensor:
        """[m] Clients that are absent this round."""
        return self.round.absent

    # -- training ------------------------------------------------------------------------------------------------

    def train(
        self,
        t: int,
        active: Tensor | None = None,
        part: slice | None = None,
        epochs: int | None = None,
        purpose: str = "batch",
        last: bool = True,
        steer: Steer | None = None,
    ) -> Tensor:
        """Every present client (of those in `active` [m], default all) trains on its own data; mean loss [m].

        part: the only columns that move; epochs: instead of the run's own; purpose: what the batches are drawn for, a
        name for each time a client trains in a round; last: the models are then complete; steer: of the gradients.
        """
        self.weights, loss = self.trained(self.weights, t, active, part, epochs, purpose, steer)
        if self.round.evaluate and last:
            self.round.before_mixing = self.evaluate(common=False).accuracy
        return loss

    def trained(
        self,
        models: Tensor,
        t: int,
        active: Tensor | None = None,
        part: slice | None = None,
        epochs: int | None = None,
        purpose: str = "batch",
        steer: Steer | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The models [m, d], trained as `train` does with the clients' own, and mean losses [m].

        A client whose model or loss is not finite afterwards is quarantined: back to where it was, excluded by its
        peers for this round (loss NaN, as for clients that did not train).
        """
        self.model.train()
        data = self.data.train
        settings = self.training if epochs is None else replace(self.training, epochs=epochs, steps=None)
        steps = local_steps(data.sizes, settings)
        if active is not None or not self.round.everybody:
            wanted = ~self.round.absent if active is None else active.to(self.device) & ~self.round.absent
            steps = torch.where(wanted.cpu(), steps, 0)
        if self.noise is not None:
            assert steer is None, "one thing at a time is done to a gradient"
            steer = self.noise.on(self.seed, t, self.ids, purpose)
        after = torch.empty_like(models) if bool(steps.all()) else models.clone()  # who trains is copied by its worker
        loss = torch.full((len(self),), torch.nan, dtype=torch.float64, device=self.device)

        def work(rows: Tensor) -> None:
            span = span_of(rows)
            here = there(rows, self.device) if span is None else span
            sizes = data.sizes[rows]
            frame = self._frames(sizes, settings)
            batches = plan(self.seed, t, self.ids[here], data.starts[here], sizes, settings, purpose, frame)
            before = models[here]
            beside = [] if steer is None else [tensor[here] for tensor in steer.beside]
            with self.room.threads(rows.numel() * settings.batch_size), rounding(self.device, self.precision):
                lengths = rates(batches, settings.rate(t), self.dtype)
                place = None if span is None else after[span]
                block, mean = self._steps(before, place, batches, lengths, settings, part, steer, beside)
            finite = all_finite(block) & torch.isfinite(mean)
            if self.device.type == "cuda" or not bool(finite.all()):  # asking a GPU would make it wait
                block = torch.where(finite[:, None], block, before, out=place)
                self.round.quarantined[here] |= ~finite
            if block is not place:
                after[here] = block
            loss[here] = mean.masked_fill(~finite, torch.nan)

        workers = self.room.workers(int((steps > 0).sum()), settings.batch_size)
        side_by_side(work, self._alike(steps, workers), workers)
        return after, loss

    def _steps(
        self,
        before: Tensor,
        place: Tensor | None,
        batches: Plan,
        sizes: Tensor,
        settings: Training,
        part: slice | None,
        steer: Steer | None,
        beside: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The models `before` [m, d] after the planned local steps (on a CPU in their `place`, if they have one; on a
        GPU steps are replayed, and the next ones write over what these found), and mean losses [m]."""
        data, program = self.data.train, self.program  # what is recorded must not keep the cohort alive
        x, looks = (self.train_x, []) if batches.looks is None else (data.x, [batches.looks])
        if self._replay is None:
            block = before.clone() if place is None else place.copy_(before)
            return block, train_chunk(program, block, x, data.y, batches, sizes, settings, part, steer, beside)

        def work(models: Tensor, index: Tensor, sizes: Tensor, *more: Tensor) -> Tensor:
            here = Plan(index, batches.frame, *more[: len(looks)])
            return train_chunk(program, models, x, data.y, here, sizes, settings, part, steer, more[len(looks) :])

        columns = None if part is None else (part.start, part.stop)
        key = tuple(before.shape), batches.counts.numpy().tobytes(), columns, None if steer is None else steer.key
        return self._replay(key, work, before, batches.index, sizes, *looks, *beside)

    def _alike(self, steps: Tensor, workers: int = 1) -> list[Tensor]:
        """Rows [*] of the clients that have steps to take, in chunks of clients with about as many steps."""
        numbers, several = 3 * self.layout.size, int((steps > 0).sum())  # with gradient and momentum
        size = self.room.fitting(numbers, self.training.batch_size, several, workers)
        return self._chunks(steps, self.data.train.sizes, self.chunk or size)

    # -- judging -------------------------------------------------------------------------------------------------

    def evaluate(self, common: bool = True) -> Scores:
        """Each client's own model on its own test set and, unless not wanted, on the one common to all if there is one.

        This is the one place that decides which models are tested.
        """
        models, rows = self.weights if self.personal is None else self.personal, torch.arange(len(self))
        if self.tuning:  # everybody, absent or not, and without a trace in the round
            now, nobody = self.round, torch.zeros_like(self.round.absent)
            self.round = Round(now.t, nobody, nobody.clone())
            models, _ = self.trained(models, now.t, epochs=self.tuning, purpose="tuning")
            self.round = now
        score = partial(judging.score, self, models, rows, mixture=self.mixture)
        scores = score(rows, self.data.test, self.test_x)
        if self.data.common is None or not common:
            return scores
        return replace(scores, common=score(torch.zeros_like(rows), self.data.common, self._common_x).accuracy)

    def losses(self, pool: Pool, ids: Tensor, name: str = "weights", head: slice | None = None) -> Tensor:
        """Loss of pulled models on each client's own training data: ids [m, c] -> [m, c], NaN if not arrived.

        head: columns in which every client puts its own parameters in place of a peer's.
        """
        return self.over_pairs(
            pool, ids, name,
            lambda models, clients: judging.score(self, pool[name], models, clients, self.data.train, head=head).loss,
        )  # fmt: skip

    def over_pairs(self, pool: Pool, ids: Tensor, name: str, work: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """What work(models [p], client rows [p]) finds for every client and each of the peers ids [m, c] that answered.

        models: rows of the pool. Its result [p] comes back as [m, c], NaN for whoever did not answer.
        """
        rows = pool.rows(ids)
        if self.device.type == "cuda" and pool[name].shape[0]:  # asking who is there would make it wait: all pairs
            clients = torch.arange(len(self)).repeat_interleave(ids.shape[1])
            found = work(rows.clamp(min=0).flatten(), clients)
            return torch.where(rows >= 0, found.view(ids.shape), torch.nan)
        client, column = torch.nonzero(rows >= 0, as_tuple=True)
        answers = torch.full(ids.shape, torch.nan, dtype=torch.float64, device=self.device)
        answers[client.to(self.device), column.to(self.device)] = work(rows[client, column], client)
        return answers

    def train_losses(self, models: Tensor) -> Tensor:
        """Loss of each of the models [c, d] on each client's own training data: [m, c], NaN without samples."""
        count = models.shape[0]
        clients = torch.arange(len(self)).repeat_interleave(count)
        scores = judging.score(self, models, torch.arange(count).repeat(len(self)), clients, self.data.train)
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

    # -- mixing --------------------------------------------------------------------------------------------------

    def mix(
        self,
        pool: Pool,
        ids: Tensor,
        coefficients: Tensor | None = None,
        own: Tensor | float = 1.0,
        record: bool = True,
        part: slice | None = None,
    ) -> None:
        """Replace each model by a weighted mean of itself and the pulled models that arrived.

        ids: [m, k], -1 for none; coefficients: [m, k] and own: [m] (default all equal). The weights of those who
        answered are scaled to sum to one; a client with nothing to mix keeps its model. `record=False` keeps it out of
        the graph of who mixed with whom, for methods in which nobody chose anybody. part: the only columns that change.
        """
        before, rows = self.weights, pool.rows(ids)
        if self.combine is not None:
            self.weights, shares = self.combine(pool, ids, coefficients, own, part)
        else:
            self.weights, shares = mix(before, pool["weights"], rows, coefficients, own, self.round.absent)
        if part is not None:
            kept = torch.ones(self.layout.size, dtype=torch.bool, device=self.device)
            kept[part] = False
            self.weights = torch.where(kept, before, self.weights)
        if record:
            self.round.edges.append((self.ids, ids, shares))

    def adopt(self, model: Tensor) -> None:
        """Every present client takes over `model` ([d] for all, or [m, d])."""
        self.weights = torch.where(
            self.round.absent[:, None], self.weights, model.to(self.dtype).expand_as(self.weights)
        )


def initial_model(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The module with the seed's initial weights, the same for every method; torch's own generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.torch_seed(seed, "init"))
        return make()
