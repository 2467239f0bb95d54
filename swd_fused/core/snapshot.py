"""A snapshot of a step's tensors: made once, kept as long as it holds, then thrown away and made anew."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swd_fused.core.backend import Backend
from swd_fused.core.bucket import NO_GRAD, Bucket, BucketKey, Entries
from swd_fused.core.tensor_checks import check_grads, check_memory, check_params
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
from swd_fused.state.moments import has_moments
from swd_fused.state.operands import SECOND_MOMENTS, STORED, are_plain, as_real, unused_columns
from swd_fused.state.weights import refuse_exchanged

State = dict[Tensor, dict[str, Any]]
Choose = Callable[[Tensor, Options], Backend]  # of the backend that steps a parameter

# How gradients look to a kernel, column by column, which is faster than all of one tensor at a time.
Forms = tuple[list[torch.dtype], list[int], list[tuple[int, ...]]]

LOCAL, DTYPE, VERSION = attrgetter("_local_tensor"), attrgetter("dtype"), attrgetter("_version")
VALUES = dict.values
NOTHING: dict[str, Any] = {}  # the state of a parameter that has none
END = (object(),)  # of what is compared one by one: `map` stops where the shorter one ends
TENSOR_GUARDS = torch._C._dynamo.guards.TensorGuards


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

    `holds` names everything that may change, except the changes of ordinary training: other gradient tensors, gradients
    that are missing in a step, other hyper-parameters.
    """

    def __init__(self, inputs: Inputs, choose: Choose) -> None:
        """Checks all tensors, and raises before anything is written if one cannot be stepped."""
        self.options, self._sharded_over, groups, self._kinds, state, self._params, grads = inputs
        self._choose = choose
        self._is_distributed = is_distributed()
        self._held: list[object] = [None]  # the state, which `commit` makes: its keys, then its tensors
        self._grad_guards: Any = None  # of all gradients, once they have been seen together
        self._entries, members = self._new_entries(groups, state, grads)
        self._has_views = not are_plain(self._entries.params)
        numbers = self._entries.numbers
        self._numbers = None if len(numbers) == len(self._params) else numbers
        self._without_state = sorted(set(range(len(self._params))) - set(numbers))
        groups_of_params = chain.from_iterable([group] * len(group["params"]) for group in groups)
        self.ranks = collective_of(list(zip(self._params, groups_of_params, strict=True)), inputs.sharded_over)
        # Parameters of groups of which nobody has said over whom to sum. A group that says None is whole.
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
            # A sparse gradient, which is refused with our own error message later; or state with entries that are no
            # dicts, or of tensors without a version, which is described anew in each step.
            return False

    def _takes(self, all_grads: list[Tensor | None]) -> bool:
        """Takes up gradients, and returns whether they, and all tensors that are kept, are what and where they were."""
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
        if not self._guards.check(*self._kept) or self._addresses != list(map(Tensor.data_ptr, self._kept)):
            return False
        addresses = list(map(Tensor.data_ptr, found))
        if 0 in addresses and any(grad.numel() for grad, address in zip(found, addresses, strict=True) if not address):
            return False  # freed, or on the meta device: refused with our own error message where that is wrong
        bucket = self.buckets[0] if len(self.buckets) == 1 else None  # a rank may have none
        if bucket is not None and present is self._all_present is bucket.present:
            bucket.grads, bucket.grad_addresses = grads, addresses
        else:
            self._hand_over(grads, addresses, present)
        return True

    def _local(self, all_grads: list[Tensor | None]) -> tuple[list[Tensor | None], list[bool], list[Tensor]]:
        """Returns the gradients of what is described, as kernels see them; which are there; and those that are."""
        grads = all_grads if self._numbers is None else [all_grads[number] for number in self._numbers]
        if self._has_views:
            grads = [None if grad is None else as_real(grad) for grad in local_grads(self._entries.params, grads)]
        if all(map(is_not, grads, repeat(None))):
            return grads, self._all_present, grads  # type: ignore[return-value]
        present = [grad is not None for grad in grads]
        return grads, present, list(compress(grads, present))  # type: ignore[arg-type]

    def _forms_of(self, present: list[bool]) -> Forms:
        """Returns how those gradients should look that are present."""
        dtypes, numels, strides = self._grad_forms
        return list(compress(dtypes, present)), list(compress(numels, present)), list(compress(strides, present))

    def _hand_over(self, grads: list[Tensor | None], addresses: list[int], present: list[bool]) -> None:
        """Gives the buckets their gradients. `addresses` are of those that are present."""
        if present is not self._all_present:
            found = iter(addresses)
            addresses = [next(found) if is_present else NO_GRAD for is_present in present]
        for bucket, members in zip(self.buckets, self._members, strict=True):
            if members is None:
                bucket.take(grads, addresses, present)
            else:
                bucket.take([grads[i] for i in members], [addresses[i] for i in members], [present[i] for i in members])

    def _remember(self) -> None:
        """Remembers all that kernels rely on without being told in each step, but for the gradients' looks."""
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
        """Takes up the gradients of the step that is described, and remembers how they look.

        Where one is missing it should look like its parameter, which mostly has its dtype and strides.
        """
        grads, present, found = self._local(all_grads)
        if self._is_fake:
            self._hand_over(grads, [0] * len(found), present)
            return
        if any(map(Tensor.is_neg, found)):
            grads, present, found = self._local(resolved(all_grads))
        # `tensor.data = other` changes the addresses of kept tensors, and torch does not count it as a write.
        # Guards of parameters alone would take the host a fifth less for a step of a thousand tensors on a GPU. But
        # `moment.data = other` may find memory at the very address that was just freed, with another dtype or shape.
        self._guards = new_guards(self._kept)
        self._addresses = list(map(Tensor.data_ptr, self._kept))
        addresses = list(map(Tensor.data_ptr, found))
        if 0 in self._addresses or 0 in addresses:
            check_memory([*self._kept, *found])
        looks = found
        if len(found) < len(grads):
            pairs = zip(self._kept, grads, strict=False)  # parameters come first
            looks = [as_real(param) if grad is None else grad for param, grad in pairs]
        self._grad_forms = forms_of(looks)
        self._hand_over(grads, addresses, present)

    def commit(self, state: State) -> None:
        """Makes the staged state the optimizer's. Nothing is refused after this."""
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
        """Returns whether the sums that the last step left are no longer those of the optimizer's second moments, or
        are travelling between other ranks."""
        state = inputs.state
        groups, others = ([kind.process_group for kind in kinds] for kinds in (self._kinds, inputs.kinds))
        if self._sharded_over is not inputs.sharded_over or groups != others:
            return True
        # By parameter, since groups may have exchanged theirs. None for one that is in no group any more.
        amsgrads = chain.from_iterable([kind.amsgrad] * kind.size for kind in inputs.kinds)
        amsgrad = dict(zip(map(id, inputs.params), amsgrads, strict=True))
        _, own_groups, params, _, _ = self._entries
        if [amsgrad.get(id(param)) for param in params] != [self._kinds[group].amsgrad for group in own_groups]:
            return True
        now = second_moments([state.get(param) or {} for param in params])
        return not are_identical(now, self._averaged) or versions(now) != self._versions

    def take_over(self, last: Snapshot) -> None:
        """Keeps the sums of the step before, if its second moments are the same, in place of rebuilding them."""
        # Switching amsgrad may leave the buckets as they are, with sums of the maxima or of what they are maxima of.
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
        """Raises if a parameter is a shard without looking like one, for steps whose result would be wrong then."""
        if self.may_have_unknown_shards:
            plain = [param for param in self._unsaid if not is_dtensor(param)]
            if plain:
                refuse_unknown_shards(plain, self.options.shared_sum)
            refuse_stage_alone(self._params, self._unsaid, self.options.shared_sum)
            self.may_have_unknown_shards = False

    def begin(self, values: GroupValues) -> None:
        """Takes up this step's hyper-parameters."""
        for bucket in self.buckets:
            bucket.hyper = values.on(bucket.device)
            if bucket.follows_params or bucket.copies_steps:
                bucket.begin()
            bucket.backend.begin(bucket)
            if bucket.device.type == "cuda":
                bucket.note_stream()

    def end(self) -> None:
        """Lets go of the step's gradients: between steps they are the user's to free."""
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
        """Returns each parameter that has state, or is going to have it, and which of them make a bucket."""
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
        """Returns what parameters of this group, dtype, device and type have in common."""
        backend = self._choose(param, self.options)
        unused = unused_columns(group, self.options, param.dtype)
        key = BucketKey(backend, param.device, group["amsgrad"], unused, ())
        return Initializer(param, self.options, group, backend), key

    def _new_buckets(self, members: Mapping[BucketKey, list[int]]) -> list[Bucket]:
        # By bucket which entries are in it, None for all of them.
        self._members = [None if len(own) == len(self._entries.numbers) else own for own in members.values()]
        pairs = zip(members, self._members, strict=True)
        return [
            Bucket(key, self._entries if own is None else self._entries.at(own), self.options) for key, own in pairs
        ]


def forms_of(grads: list[Tensor]) -> Forms:
    return list(map(DTYPE, grads)), list(map(Tensor.numel, grads)), list(map(Tensor.stride, grads))


def resolved(grads: list[Tensor | None]) -> list[Tensor | None]:
    """Returns gradients of which none is lazily negated: its memory would have the other sign."""
    return [None if grad is None else grad.resolve_neg() for grad in grads]


def second_moments(states: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """Returns the second moments of some states, and the local parts of those that are DTensors: writes to a DTensor
    count on it or on its local part, depending on how it was written to."""
    held = set().union(*states)
    keys = [key for key in SECOND_MOMENTS if key in held]
    found = [state[key] for state in states for key in keys if key in state]
    return [*found, *map(local_tensor, dtensors_in(found))]


def are_identical(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(is_, tensors, others))


def new_guards(tensors: Sequence[Tensor]) -> Any:
    """Returns an object whose `check` tells whether tensors still have the type, dtype, device, shape and strides.

    It is what torch.compile asks before it runs a graph: one call, in which a thousand tensors take 50 us, where asking
    each for its dtype, size and strides takes 200. It also tells if torch dispatches otherwise, under autocast for
    instance.
    """
    return TENSOR_GUARDS(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def versions(tensors: list[Tensor]) -> list[int]:
    """Returns torch's counters of in-place writes, 0 for tensors made in inference mode, which have none."""
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
