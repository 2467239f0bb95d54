"""The buckets of an optimizer: which tensors are stepped together, and how long that holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor

from swd_fused import captures
from swd_fused.distributed.sharding import Sharding
from swd_fused.group_checks import check_grads, check_params
from swd_fused.moments import has_moments
from swd_fused.options import Options, StateDtype
from swd_fused.schedule import HyperRow, HyperRows

if TYPE_CHECKING:
    from swd_fused.backends import Backend

from swd_fused.bucket import Bucket, Entry, Group

# Wrappers that show the optimizer one group at a time come back to each of them.
ARRANGEMENTS_KEPT = 8


class Arrangement:
    """The buckets of a step, good for the next one as long as it has the same tensors in the same groups."""

    def __init__(
        self, params: list[Tensor], groups: Sequence[Group], entries: list[Entry], buckets: list[Bucket]
    ) -> None:
        self.buckets = buckets
        self._params = params
        self._signature = _signature(groups)
        self._entries = entries
        self._with_state = [entry.param for entry in entries]
        self._owned = [entry.owned for entry in entries]
        numbers = {entry.number for entry in entries}
        self._without_state = [number for number in range(len(params)) if number not in numbers]

    def serves(
        self,
        params: list[Tensor],
        groups: Sequence[Group],
        grads: Sequence[Tensor | None],
        state: Mapping[Tensor, dict[str, Any]],
    ) -> bool:
        return (
            self._signature == _signature(groups)
            and all(map(is_, self._params, params))
            and (not self._without_state or all(grads[number] is None for number in self._without_state))
            and all(map(is_, self._owned, _states_of(self._with_state, state)))
            and all(bucket.is_current() for bucket in self.buckets)
        )

    def was_changed(self, params: list[Tensor]) -> bool:
        """Whether the sums that these buckets left no longer are those of the optimizer's state."""
        ids = set(map(id, params))
        return not ids.issuperset(map(id, self._with_state)) or any(
            bucket.second_moments_changed() for bucket in self.buckets
        )

    def commit(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Makes the entries' staged state the optimizer's."""
        for entry in self._entries:
            for key in entry.owned.keys() - entry.staged.keys():
                del entry.owned[key]
            entry.owned.update(entry.staged)
            state[entry.param] = entry.owned


class Buckets:
    """The buckets of an optimizer, kept from step to step."""

    def __init__(
        self,
        options: Options,
        backend_of: Callable[[Tensor], Backend],
        sharding_of: Callable[[Tensor, Group], Sharding],
        staged: Callable[[dict[str, Any], Tensor, Group], dict[str, Any]],
    ) -> None:
        """`staged(state, param, group)` returns the state with everything that a step needs, leaving `state` as it
        is."""
        self._options = options
        self._backend_of = backend_of
        self._sharding_of = sharding_of
        self._staged = staged
        self._hyper_rows = HyperRows(options.decay)
        self.rows: list[HyperRow] = []  # of the last step's hyper-parameters
        self._kept: list[Arrangement] = []  # the one that was used last comes first
        self.current: list[Bucket] = []  # of the last step
        self.are_captured = False  # in a CUDA graph, which these then are copies for
        self.were_changed = False  # by others, since the last step: what that step left does not hold any more

    def begin(
        self, groups: Sequence[Group], state: dict[Tensor, dict[str, Any]], grads: Sequence[Tensor | None]
    ) -> list[Bucket]:
        """Returns the buckets of a step, ready for both passes.

        Everything that can be refused is refused here, for all buckets, before anything is written.
        """
        rows = self.rows = self._hyper_rows.current(groups)
        params = list(chain.from_iterable(map(itemgetter("params"), groups)))
        arrangement = None
        for kept in self._kept:
            if kept.serves(params, groups, grads, state):
                arrangement = kept
                break
        is_new = arrangement is None
        if arrangement is None:
            captures.check_prepared({param.device for param in params})
            arrangement = self._arrange(params, groups, state, grads)
        buckets = arrangement.buckets
        are_captured = any(captures.is_capturing(bucket.device) for bucket in buckets)
        if are_captured:
            buckets = [bucket.for_capture() for bucket in buckets]
        try:
            for bucket in buckets:
                bucket.begin(grads, rows, groups)
                bucket.backend.prepare(bucket)
        except BaseException:
            for bucket in buckets:
                bucket.end()
            raise
        last = self._kept[0] if self._kept else None
        if arrangement is not last:
            self.were_changed = last is not None and last.was_changed(params)
            if is_new:
                arrangement.commit(state)
            self._kept = [arrangement, *(kept for kept in self._kept if kept is not arrangement)][:ARRANGEMENTS_KEPT]
        else:
            self.were_changed = False
        self.current, self.are_captured = buckets, are_captured
        for bucket in buckets:
            bucket.follow_params()
        return buckets

    def end(self) -> None:
        """Lets go of the step's gradients: between steps they are the user's to free."""
        for bucket in self.current:
            bucket.end()
        if self.are_captured:  # the writes are counted, and known only to the copies
            for bucket in self._kept[0].buckets:
                bucket.note_versions()

    def _arrange(
        self,
        params: list[Tensor],
        groups: Sequence[Group],
        state: Mapping[Tensor, dict[str, Any]],
        grads: Sequence[Tensor | None],
    ) -> Arrangement:
        """Puts each parameter that has state, or is going to have it, into a bucket."""
        entries: list[Entry] = []
        by_kind: defaultdict[tuple[Any, ...], list[Entry]] = defaultdict(list)
        group_indices = chain.from_iterable([index] * len(group["params"]) for index, group in enumerate(groups))
        present = [(param, grad) for param, grad in zip(params, grads, strict=True) if grad is not None]
        check_params(params, "all groups")
        check_grads([param for param, _ in present], [grad for _, grad in present])
        for number, (index, param, grad) in enumerate(zip(group_indices, params, grads, strict=True)):
            owned = state.get(param) or {}
            if grad is None and not has_moments(owned):
                continue
            amsgrad = groups[index]["amsgrad"]
            entry = Entry(number, index, param, owned, self._staged(owned, param, groups[index]))
            has_master = self._options.needs_master(param.dtype)
            backend, sharding = self._backend_of(param), self._sharding_of(param, groups[index])
            by_kind[backend, param.device, amsgrad, has_master, sharding].append(entry)
            entries.append(entry)
        buckets = [
            Bucket(backend, amsgrad, has_masters, same, self._options, sharding)
            for (backend, _, amsgrad, has_masters, sharding), same in by_kind.items()
        ]
        return Arrangement(params, groups, entries, buckets)


def _signature(groups: Sequence[Group]) -> list[tuple[int, bool, StateDtype]]:
    """Which parameters are in which group, and the hyper-parameters that decide which state they have."""
    return [(len(group["params"]), group["amsgrad"], group["state_dtype"]) for group in groups]


def _states_of(params: list[Tensor], state: Mapping[Tensor, dict[str, Any]]) -> Iterable[dict[str, Any] | None]:
    """Mostly in the order of the parameters, and then without hashing them, which took a fifth of the host's time."""
    if len(state) == len(params) and all(map(is_, state, params)):
        return state.values()
    return [state.get(param) for param in params]
