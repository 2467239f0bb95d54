"""A snapshot of a step's tensors: made once, and reused until something that it describes has changed."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.checks import check_grads, check_memory, check_params
from swd_fused.core.backend import Backend
from swd_fused.core.bucket import NO_GRAD, Bucket, BucketKey, Entries
from swd_fused.core.values import Group, GroupKind, Groups, GroupValues
from swd_fused.distributed.collective import collective_of
from swd_fused.distributed.refusals import refuse_stage_alone, refuse_unknown_shards
from swd_fused.distributed.sharding import (
    ShardedOver,
    dtensors_in,
    is_distributed,
    is_dtensor,
    local_grads,
    local_tensor,
    sharding_in,
)
from swd_fused.options import Options
from swd_fused.state.load import Initializer
from swd_fused.state.storage import SECOND_MOMENTS, STORED, are_plain, as_real, has_moments, unused_columns
from swd_fused.state.weights import refuse_exchanged

State = dict[Tensor, dict[str, Any]]
Choose = Callable[[Tensor, Options], Backend]  # returns the backend that steps a parameter

# The dtypes, sizes and strides of gradients. Comparing lists by column is faster than tensor by tensor.
Forms = tuple[list[torch.dtype], list[int], list[tuple[int, ...]]]

LOCAL, DTYPE, VERSION = attrgetter("_local_tensor"), attrgetter("dtype"), attrgetter("_version")
VALUES = dict.values
NOTHING: dict[str, Any] = {}  # the state of a parameter that has none
END = (object(),)  # appended to lists that `map` compares, since it stops where the shorter one ends
TENSOR_GUARDS = torch._C._dynamo.guards.TensorGuards

# How many tensors are watched together. Those of a thousand parameters in one go were fetched from memory twice, for
# their guards and for their addresses, and beside other work on the same cores took a third longer.
WATCHED = 384


class Inputs(NamedTuple):
    """Holds everything that the snapshot of a step depends on."""

    options: Options  # as `Options.of_tensors` has them
    sharded_over: ShardedOver | None
    groups: Groups
    kinds: list[GroupKind]
    state: State
    params: list[Tensor]
    grads: list[Tensor | None]


class Snapshot:
    """Describes all tensors of a step: the buckets in which they are stepped, and the ranks that share them.

    `holds` compares everything that makes a snapshot stale. Ordinary training does not: other gradient tensors, missing
    gradients and other hyper-parameters are taken up.
    """

    def __init__(self, inputs: Inputs, choose: Choose) -> None:
        """Checks all tensors, and raises before anything is written if one cannot be stepped."""
        self.options, self._sharded_over, groups, self._kinds, state, params, grads = inputs
        self._params = list(params)  # a copy, since it may be the group's own list
        self._choose = choose
        self._is_distributed = is_distributed()
        self._held: list[object] = [None]  # the state's keys, then its tensors; filled in by `commit`
        self._grad_guards: Any = None  # guards of all gradients, made in the first step that has them all
        self._entries, members = self._new_entries(groups, state, grads)
        self._has_views = not are_plain(self._entries.params)
        numbers = self._entries.numbers
        self._numbers = None if len(numbers) == len(self._params) else numbers
        self._without_state = sorted(set(range(len(self._params))) - set(numbers))
        groups_of_params = chain.from_iterable([group] * len(group["params"]) for group in groups)
        self.ranks = collective_of(list(zip(self._params, groups_of_params, strict=True)), inputs.sharded_over)
        # Parameters without a stated process group. A group that states None says that its parameters are whole.
        unsaid = (group for group in groups if "process_group" not in group and inputs.sharded_over is None)
        self._unsaid = [param for group in unsaid for param in group["params"]] if self._is_distributed else []
        self.may_have_unknown_shards = self._is_distributed
        self.has_amsgrad = any(group["amsgrad"] for group in groups)
        self.buckets = self._new_buckets(members)
        is_alone = len(self.buckets) == 1 and self.ranks.is_local and self.options.total_numel is None
        self.only_bucket = self.buckets[0] if is_alone else None
        self.gpus = {bucket.device for bucket in self.buckets if bucket.device.type == "cuda"}
        self.are_captured = False
        self._is_fake = any(bucket.is_fake for bucket in self.buckets)
        self._remember()
        try:
            self._take_first(grads)
            for bucket in self.buckets:
                bucket.check()
                bucket.plan = bucket.backend.plan(bucket)
        except BaseException:
            for bucket in self.buckets:
                bucket.grads = []
            raise

    def holds(self, inputs: Inputs) -> bool:
        """Takes up the gradients, and returns whether nothing has changed that kernels rely on."""
        options, sharded_over, _, kinds, state, params, grads = inputs
        try:
            return (
                self.options is options
                and self._sharded_over is sharded_over
                and self._is_distributed == is_distributed()
                and self._kinds == kinds
                and all(map(is_, chain(self._params, END), chain(params, END)))
                and all(map(is_, self._held, chain.from_iterable(chain((state,), map(VALUES, state.values()), (END,)))))
                and all(map(is_, self._locals, map(LOCAL, self._dtensors)))
                and self._versions == list(map(VERSION, self._averaged))
                and self._takes(grads)
            )
        except (RuntimeError, TypeError):
            # Sparse gradients are refused later, with our own error message. State with entries that are no dicts, or
            # with tensors that have no version, is described anew in each step.
            return False

    def _takes(self, all_grads: list[Tensor | None]) -> bool:
        """Takes up gradients. Returns whether all tensors look as before, and kept ones have not moved."""
        if self._is_fake or (self._without_state and any(all_grads[i] is not None for i in self._without_state)):
            return False
        grads, present, found = self._local(all_grads)
        has_all = present is self._all_present
        if not (has_all and self._grad_guards is not None and self._grad_guards.check(*found)):
            if any(map(Tensor.is_neg, found)):
                grads, present, found = self._local(resolved(all_grads))
            if forms_of(found) != self._forms_of(present):
                return False
            self._grad_guards = new_guards(found) if has_all else self._grad_guards
        for kept, guards, before in self._watched:
            if not guards.check(*kept) or before != list(map(Tensor.data_ptr, kept)):
                return False
        addresses = list(map(Tensor.data_ptr, found))
        if 0 in addresses and any(grad.numel() for grad, address in zip(found, addresses, strict=True) if not address):
            return False  # freed, or on the meta device: a new snapshot refuses it, with our own error message
        bucket = self.buckets[0] if len(self.buckets) == 1 else None  # a rank may have none
        if bucket is not None and present is self._all_present is bucket.present:
            bucket.grads, bucket.grad_addresses = grads, addresses
        else:
            self._hand_over(grads, addresses, present)
        return True

    def _local(self, all_grads: list[Tensor | None]) -> tuple[list[Tensor | None], list[bool], list[Tensor]]:
        """Returns the described parameters' gradients as kernels see them, which of them exist, and a list of these."""
        grads = all_grads if self._numbers is None else [all_grads[number] for number in self._numbers]
        if self._has_views:
            grads = [None if grad is None else as_real(grad) for grad in local_grads(self._entries.params, grads)]
        if all(map(is_not, grads, repeat(None))):
            return grads, self._all_present, grads  # type: ignore[return-value]
        present = [grad is not None for grad in grads]
        return grads, present, list(compress(grads, present))  # type: ignore[arg-type]

    def _forms_of(self, present: list[bool]) -> Forms:
        """Returns the expected forms of the gradients that are present."""
        dtypes, numels, strides = self._grad_forms
        return list(compress(dtypes, present)), list(compress(numels, present)), list(compress(strides, present))

    def _hand_over(self, grads: list[Tensor | None], addresses: list[int], present: list[bool]) -> None:
        """Gives the buckets their gradients. `addresses` are those of the gradients that are present."""
        if present is not self._all_present:
            found = iter(addresses)
            addresses = [next(found) if is_present else NO_GRAD for is_present in present]
        for bucket, members in zip(self.buckets, self._members, strict=True):
            if members is None:
                bucket.take(grads, addresses, present)
            else:
                bucket.take([grads[i] for i in members], [addresses[i] for i in members], [present[i] for i in members])

    def _remember(self) -> None:
        """Remembers everything that kernels rely on from step to step, except the gradients' forms."""
        _, _, params, _, states = self._entries
        held = set().union(*states)
        keys = [key for key in STORED if key in held]
        tensors = [*params, *(state[key] for state in states for key in keys if key in state)]
        self._dtensors = dtensors_in(tensors)
        self._locals = list(map(LOCAL, self._dtensors))
        self._kept = tuple(map(local_tensor, tensors)) if self._dtensors else tuple(tensors)
        self._averaged = second_moments(states)
        self._versions = versions(self._averaged)
        self._all_present = [True] * len(params)

    def _take_first(self, all_grads: list[Tensor | None]) -> None:
        """Takes up the first step's gradients, and remembers their forms.

        A missing gradient is expected to look like its parameter: dtype and strides are mostly the same.
        """
        grads, present, found = self._local(all_grads)
        if self._is_fake:
            self._hand_over(grads, [0] * len(found), present)
            return
        if any(map(Tensor.is_neg, found)):
            grads, present, found = self._local(resolved(all_grads))
        # `tensor.data = other` changes the addresses of kept tensors, and torch does not count it as a write.
        # With guards of parameters alone the host would take a fifth less for a step of a thousand tensors on a GPU.
        # But `moment.data = other` may reuse the address that was just freed, with another dtype or shape.
        parts = (self._kept[start : start + WATCHED] for start in range(0, len(self._kept), WATCHED))
        self._watched = [(part, new_guards(part), list(map(Tensor.data_ptr, part))) for part in parts]
        addresses = list(map(Tensor.data_ptr, found))
        if 0 in addresses or any(0 in before for _, _, before in self._watched):
            check_memory([*self._kept, *found])
        looks = found
        if len(found) < len(grads):
            pairs = zip(self._kept, grads, strict=False)  # parameters come first
            looks = [as_real(param) if grad is None else grad for param, grad in pairs]
        self._grad_forms = forms_of(looks)
        self._hand_over(grads, addresses, present)

    def commit(self, state: State) -> None:
        """Makes the staged state the optimizer's own. Nothing is refused after this."""
        for _, _, param, owned, staged in zip(*self._entries, strict=True):
            state[param] = owned
            if owned is not staged:
                for key in owned.keys() - staged.keys():
                    del owned[key]
                owned.update(staged)
        self._entries = self._entries._replace(staged=self._entries.owned)
        held = chain.from_iterable(entry.values() if isinstance(entry, dict) else () for entry in state.values())
        self._held = [*state, *held, *END]

    def left_is_stale(self, inputs: Inputs) -> bool:
        """Returns whether the sums that the last step left no longer match the optimizer's second moments, or are being
        reduced over other ranks than this step's."""
        state = inputs.state
        groups, others = ([kind.process_group for kind in kinds] for kinds in (self._kinds, inputs.kinds))
        if self._sharded_over is not inputs.sharded_over or groups != others:
            return True
        # By parameter, since parameters may have moved to another group. None if one is in no group any more.
        amsgrads = chain.from_iterable([kind.amsgrad] * kind.size for kind in inputs.kinds)
        amsgrad = dict(zip(map(id, inputs.params), amsgrads, strict=True))
        _, own_groups, params, _, _ = self._entries
        if [amsgrad.get(id(param)) for param in params] != [self._kinds[group].amsgrad for group in own_groups]:
            return True
        now = second_moments([state.get(param) or {} for param in params])
        return not are_identical(now, self._averaged) or versions(now) != self._versions

    def take_over(self, last: Snapshot) -> None:
        """Keeps the last step's sums if its second moments are the same, which saves rebuilding the sums."""
        # Switching amsgrad may leave the same buckets, but their sums are then of other tensors.
        divisions = ([(bucket.numbers, bucket.amsgrad) for bucket in one.buckets] for one in (last, self))
        is_same_division = next(divisions) == next(divisions)
        are_same = are_identical(last._averaged, self._averaged) and last._versions == self._versions
        if are_same and is_same_division:
            for bucket, before in zip(self.buckets, last.buckets, strict=True):
                if bucket.backend is before.backend:
                    bucket.sums = before.sums

    def shares_params_with(self, params: Iterable[Tensor]) -> bool:
        return not set(map(id, self._params)).isdisjoint(map(id, params))

    def params_with_grad(self) -> list[Tensor]:
        pairs = chain.from_iterable(zip(bucket.numbers, bucket.grads, strict=True) for bucket in self.buckets)
        return [self._params[number] for number, grad in pairs if grad is not None]

    def refuse_unknown_shards(self) -> None:
        """Raises if plain tensors are shards of the model: sums over this rank alone would be wrong."""
        plain = [param for param in self._unsaid if not is_dtensor(param)]
        if plain:
            refuse_unknown_shards(plain, self.options.shared_sum)
        refuse_stage_alone(self._params, self._unsaid, self.options.shared_sum)
        self.may_have_unknown_shards = False

    def begin(self, values: GroupValues) -> None:
        """Prepares all buckets for a step with these hyper-parameters."""
        for bucket in self.buckets:
            bucket.hyper = values.on(bucket.device)
            if bucket.follows_params or bucket.copies_steps:
                bucket.begin()
            bucket.backend.begin(bucket)
            if bucket.device.type == "cuda":
                bucket.note_stream()

    def end(self) -> None:
        """Drops references to the step's gradients, which users may free between steps."""
        for bucket in self.buckets:
            if bucket.copies_steps:
                bucket.write_steps()
            bucket.grads = []
            if bucket.backend.counts_writes or bucket.plan.copies:
                self.note_versions()

    def note_versions(self) -> None:
        """Accepts the second moments as they are."""
        self._versions = versions(self._averaged)

    def for_capture(self) -> Snapshot:
        """Returns a copy for a step that is captured in a CUDA graph, which must be kept as long as the graph is."""
        captured = copy.copy(self)
        captured.buckets = [bucket.for_capture() for bucket in self.buckets]
        captured.only_bucket = captured.buckets[0] if self.only_bucket else None
        captured.are_captured = True
        return captured

    def _new_entries(
        self, groups: Groups, state: Mapping[Tensor, dict[str, Any]], grads: list[Tensor | None]
    ) -> tuple[Entries, Mapping[BucketKey, list[int]]]:
        """Returns the parameters that have state or get it now, and the positions of each bucket's parameters."""
        refuse_exchanged(state, "a step")
        check_params(self._params, "all groups")
        check_grads((param, grad) for param, grad in zip(self._params, grads, strict=True) if grad is not None)
        kinds: dict[tuple[object, ...], tuple[Initializer, BucketKey]] = {}
        members: defaultdict[BucketKey, list[int]] = defaultdict(list)  # positions among the entries
        numbers, own_groups, params, owneds, stageds = entries = Entries([], [], [], [], [])
        indices = chain.from_iterable([index] * len(group["params"]) for index, group in enumerate(groups))
        for number, (index, param, grad) in enumerate(zip(indices, self._params, grads, strict=True)):
            owned = state.get(param) or NOTHING
            if grad is None and not has_moments(owned):
                continue
            kind = index, param.dtype, param.device, type(param)
            known = kinds.get(kind)
            if known is None:
                known = kinds[kind] = self._new_kind(param, groups[index])
            initializer, key = known
            if self._is_distributed:
                key = key._replace(sharding=sharding_in(groups[index], param, self._sharded_over))
            staged = initializer.state_for(param, owned)
            members[key].append(len(numbers))
            numbers.append(number)
            own_groups.append(index)
            params.append(param)
            owneds.append(owned or staged)
            stageds.append(staged)
        return entries, members

    def _new_kind(self, param: Tensor, group: Group) -> tuple[Initializer, BucketKey]:
        """Returns the initializer and the bucket key of parameters of this group, dtype, device and type."""
        backend = self._choose(param, self.options)
        unused = unused_columns(group, self.options, param.dtype)
        key = BucketKey(backend, param.device, group["amsgrad"], unused, ())
        return Initializer(param, self.options, group, backend), key

    def _new_buckets(self, members: Mapping[BucketKey, list[int]]) -> list[Bucket]:
        # The positions of each bucket's entries; None if it has all of them.
        self._members = [None if len(own) == len(self._entries.numbers) else own for own in members.values()]
        pairs = zip(members, self._members, strict=True)
        return [
            Bucket(key, self._entries if own is None else self._entries.at(own), self.options) for key, own in pairs
        ]


def forms_of(grads: list[Tensor]) -> Forms:
    return list(map(DTYPE, grads)), list(map(Tensor.numel, grads)), list(map(Tensor.stride, grads))


def resolved(grads: list[Tensor | None]) -> list[Tensor | None]:
    """Resolves lazily negated gradients, whose memory has the other sign."""
    return [None if grad is None else grad.resolve_neg() for grad in grads]


def second_moments(states: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Returns the second moments of some states, and the local parts of those that are DTensors: depending on how a
    DTensor is written to, torch counts the write on the DTensor or on its local part."""
    held = set().union(*states)
    keys = [key for key in SECOND_MOMENTS if key in held]
    found = [state[key] for state in states for key in keys if key in state]
    return [*found, *map(local_tensor, dtensors_in(found))]


def are_identical(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(is_, tensors, others))


def new_guards(tensors: Sequence[Tensor]) -> Any:
    """Returns an object whose `check` tells whether tensors still have the type, dtype, device, shape and strides.

    torch.compile uses it before it runs a graph. One call checks a thousand tensors in 50 us, where asking each for its
    dtype, size and strides takes 200. The check also fails if torch dispatches differently, as under autocast.
    """
    return TENSOR_GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def versions(tensors: list[Tensor]) -> list[int]:
    """Returns torch's counters of in-place writes. Tensors made in inference mode have none, and count as 0."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
