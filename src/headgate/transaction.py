"""Transactions: loads in several shards that come together, once, whoever carries them out.

Owns: the intent, and carrying it out. Does not own: the steps in one shard (load), the files (bulk).

A shard changes by one commit, so rows for several shards need several, and whoever makes them may
die in between, or be two. What decides is one object, the INTENT, created only if absent:

    1. announce, in every shard of the table, also those that get no rows
    2. create the intent: it names the loads, shard by shard. From here on it happens
    3. place each load; the commit that places it records the transaction in that shard

A name of an intent is ``txn/<application>/<version>.<try>.json``, and each announcement says which
one it waits for. So anybody who meets an announcement can find out what is to become of it, and
once its lease is over he can have it decided: he creates that intent himself, as ABORTED.

- Dead before 2: nothing was visible. The next attempt at the same version has other files and other
  loads, and its intent; placing its loads drops the announcements that lost.
- Dead after 2: whoever comes next finds the intent and places the loads that IT names. Attempts never mix.
- Two attempts at once: one creates the intent. The other finds it, and carries it out.
- Two versions at once: the later one, once it is announced everywhere, has the earlier one decided before its own
  intent: as aborted, unless its intent stands already; then it is carried out first. None comes half.
- Stalled before 2, aborted meanwhile, awake again: the name is taken, by an abort. Nothing happened;
  the next attempt uses the next try, because the last one is aborted.
- Stalled before 1 until all is over and collected: every shard has the mark of this version, so none
  takes the announcement. That is why shards without rows get the mark, too.

A version is new if it is higher than the last one of its application, and the last one again is
acknowledged without doing anything. Lower ones, or those of another query, are refused: they can only
come from a checkpoint that was deleted or restored, and what they hold may or may not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import quote

from headgate.clock import Clock, map_ordered
from headgate.errors import CommitConflictError, HeadgateError, ObjectMissingError, OutcomeUnknownError, TransactionConflictError
from headgate.failpoint import failpoint
from headgate.load import announce, has_mark, place, withdraw
from headgate.manifest.document import decode_document, encode_document
from headgate.manifest.model import AnnouncedLoad, Intent, RunRecord, ShardManifest
from headgate.store import RetryPolicy, Store, create_exactly
from headgate.wal.log import ShardLog

LEASE_SECONDS = 600.0
"""How long an announcement may stand undecided."""
ONCE = "~"
"""Names of applications that are used for one transaction only begin so; their marks are not kept."""
_SHARDS_AT_ONCE = 8
_TRIES_MAX = 1000

Result = TypeVar("Result")


@dataclass(frozen=True)
class Transactions:
    """The transactions of one table."""

    store: Store
    clock: Clock
    log_of: Callable[[str], ShardLog]
    policy: RetryPolicy = field(default_factory=RetryPolicy)

    # -- carrying out

    def check(self, shards: Sequence[str], app: str, version: int, query: str | None) -> bool:
        """Before anything is written: is it there already? What was left half done is finished first.

        Raises:
            TransactionConflictError: the version is lower than the last one, or another query counts for this application.
        """
        return self._is_done(self._latest(shards), app, version, query)

    def commit(
        self, shards: Sequence[str], app: str, version: int, query: str | None, runs: Mapping[str, Sequence[RunRecord]], attempt: str
    ) -> bool:
        """Bring in runs, in all their shards or in none. False: this version was there already.

        Args:
            shards: all of the table's.
            attempt: under which the files were written, registered in each shard.

        Raises:
            TransactionConflictError: refused, or aborted by somebody who found it too slow; nothing was brought in.
            CommitConflictError: the attempt is over, or the table has other shards by now; nothing was brought in.
        """
        # 0. Is it new? What another attempt, or the version before, has left half done is finished first (P11).
        manifests = self._latest(shards)
        if self._is_done(manifests, app, version, query):
            return False
        name = self._free_name(app, version, manifests[0].table_id if manifests else None)
        loads = {shard: self.clock.token() for shard in shards}

        # 1. Announce everywhere: the files are held, and every shard would take it.
        def announce_one(shard: str) -> ShardManifest:
            load = AnnouncedLoad(
                runs=tuple(runs.get(shard, ())),
                transaction=name,
                app=app,
                version=version,
                query=query,
                expires_at=self.clock.now() + LEASE_SECONDS,
            )
            return announce(self.log_of(shard), loads[shard], load, attempt)

        try:
            manifests = self._each(announce_one, shards)
        except (CommitConflictError, TransactionConflictError):
            self._take_back(loads)
            if self.check(shards, app, version, query):
                return False  # another attempt was faster
            raise
        except HeadgateError:
            self._take_back(loads)
            raise
        failpoint("transaction.announced")
        # Lower versions that others have announced are decided first, and none is announced any more where ours is.
        # Placed after ours they would be refused, here and there or everywhere, and whoever loads them told that all is well.
        for manifest in manifests:
            for id, other in manifest.announced.items():
                if other.app == app and other.version < version:
                    self.decide(self.log_of(manifest.shard), id, other)

        # 2. The intent decides. Whatever the reply, what stands under the name counts.
        table_id = manifests[0].table_id if manifests else None
        mine = Intent(id=self.clock.token(), app=app, version=version, query=query, state="committed", table_id=table_id, loads=loads)
        occupant = create_exactly(self.store, name, encode_document(mine), self.clock, self.policy)
        failpoint("transaction.decided")
        if occupant is None:
            # 3. It happens.
            try:
                placed = self.carry_out(mine)
            except TransactionConflictError as error:
                if not app.startswith(ONCE):
                    raise
                raise OutcomeUnknownError(
                    f"whether {attempt} came in is unknown: {error.message}",
                    hint="it stopped for longer than is remembered of such loads: look at the rows before you load them again",
                ) from error
            if any(placed[shard] is None for shard in runs if shard in placed):
                # Aborted by the later one, most likely, and the abort was collected: its name was free again.
                raise OutcomeUnknownError(
                    f"whether version {version} of {app!r} came in is unknown: a later one has overtaken it",
                    hint="versions of one application come one after the other; look at the rows",
                )
            return True
        found = _seen(decode_document(occupant, Intent, name), table_id)
        if found.state == "aborted":
            self._take_back(loads)
            raise TransactionConflictError(
                f"version {version} of {app!r} was aborted: its announcement stood longer than {LEASE_SECONDS:g} s, or a later one came",
                hint="nothing of it was brought in; load it again",
            )
        self.carry_out(found)
        _check_query(app, query, {found.query})
        return False

    def carry_out(self, intent: Intent) -> dict[str, bool | None]:
        """Place what a committed intent names. Can be repeated, by anyone. For each shard what ``place`` told."""

        def place_one(shard: str) -> bool | None:
            placed = place(self.log_of(shard), intent.loads[shard], intent.app, intent.version)
            failpoint("transaction.placed")
            return placed

        shards = sorted(intent.loads)
        return dict(zip(shards, self._each(place_one, shards), strict=True))

    def resolve(self, log: ShardLog, manifest: ShardManifest | None = None, *, decided: bool = False) -> bool:
        """Have announcements decided whose lease is over. True: none stands any more.

        Args:
            decided: also carry out those that are decided and whose owner may be at it, or dead: for whoever waits for them.
        """
        manifest = manifest or log.manifests.load()
        waiting = False
        for id, load in manifest.announced.items():
            if load.expires_at > self.clock.now() and not (decided and self.read(load.transaction) is not None):
                waiting = True
            else:
                self.decide(log, id, load)
        return not waiting

    def finish_those_between(self, manifests: Sequence[ShardManifest]) -> bool:
        """Do these versions, one of each shard, have some transaction in one shard and not in another? Then it is carried out.

        Every shard announces before it is decided, so a shard that has not placed it yet shows that it is on its way; unless its
        version is from before: t0 shard 1 is pinned · t1 the transaction is announced and placed in both · t2 shard 2 is pinned.
        """
        on_their_way = {load.transaction for manifest in manifests for load in manifest.announced.values()}
        intents = [intent for name in sorted(on_their_way) if (intent := self.read(name)) is not None and intent.state == "committed"]
        for intent in intents:
            self.carry_out(intent)
        return bool(intents) or any(self._was_too_early(manifest, manifests) for manifest in manifests)

    def _was_too_early(self, one: ShardManifest, others: Sequence[ShardManifest]) -> bool:
        """Has this shard, since that version of it, got a transaction that another version has already?

        A mark that is missing may also have been forgotten there (gc). Then it is not there now either.
        """
        missing = {
            (app, mark.version) for other in others for app, mark in other.transactions.items() if not has_mark(one, app, mark.version)
        }
        if not missing:
            return False
        now = self.log_of(one.shard).manifests.load()
        on_their_way = {(load.app, load.version) for load in now.announced.values()}
        return any(has_mark(now, *wanted) or wanted in on_their_way for wanted in missing)

    def decide(self, log: ShardLog, id: str, load: AnnouncedLoad) -> None:
        """Find out what is to become of an announced load, or see that nothing does; then do it."""
        abort = Intent(id=self.clock.token(), app=load.app, version=load.version, query=load.query, state="aborted", table_id=log.table_id)
        occupant = create_exactly(self.store, load.transaction, encode_document(abort), self.clock, self.policy)
        found = abort if occupant is None else _seen(decode_document(occupant, Intent, load.transaction), log.table_id)
        failpoint("transaction.resolved")
        is_over = found.loads.get(log.shard) != id
        if found.state == "committed":
            try:
                self.carry_out(found)
            except TransactionConflictError:
                if not load.app.startswith(ONCE):
                    raise
                is_over = True  # carried out, collected and forgotten while we looked; or aborted and collected before it was decided
        if is_over:
            withdraw(log, id)

    # -- looking

    def _latest(self, shards: Sequence[str]) -> list[ShardManifest]:
        return self._each(lambda shard: self.log_of(shard).manifests.load(), shards)

    def _is_done(self, manifests: Sequence[ShardManifest], app: str, version: int, query: str | None) -> bool:
        marks = [manifest.transactions.get(app) for manifest in manifests]
        known = [mark for mark in marks if mark is not None]
        last = max((mark.version for mark in known), default=None)
        queries = {mark.query for mark in known}
        table_id = manifests[0].table_id if manifests else None
        for found in self._left_over(app, min((mark.version if mark is not None else -1 for mark in marks), default=-1), version):
            intent = _seen(found, table_id)
            if intent.state == "aborted":
                continue
            self.carry_out(intent)
            last = max(intent.version, -1 if last is None else last)
            queries.add(intent.query)
        _check_query(app, query, queries)
        if last is not None and version < last:
            raise TransactionConflictError(
                f"version {version} of {app!r} comes after {last}",
                hint="versions only grow: was the stream's checkpoint deleted or restored? choose another appId if its rows are new",
            )
        return version == last

    def _left_over(self, app: str, above: int, through: int) -> list[Intent]:
        """Committed intents with versions above one, up to another, oldest first."""
        found = [self.read(info.key) for info in self.store.list(_folder(app), start_after=f"{_folder(app)}{max(above, -1) + 1:020d}")]
        return [intent for intent in found if intent is not None and intent.state == "committed" and above < intent.version <= through]

    def _free_name(self, app: str, version: int, table_id: str | None) -> str:
        """Of the first try that was not aborted."""
        for number in range(_TRIES_MAX):
            name = f"{_folder(app)}{version:020d}.{number:04d}.json"
            intent = self.read(name)
            if intent is None or _seen(intent, table_id).state != "aborted":
                return name
        raise TransactionConflictError(f"version {version} of {app!r} was aborted {_TRIES_MAX} times", hint="load faster, or less at once")

    def read(self, name: str) -> Intent | None:
        """An intent; None: there is none."""
        try:
            return decode_document(self.store.get(name), Intent, name)
        except ObjectMissingError:
            return None

    def _take_back(self, loads: Mapping[str, str]) -> None:
        """Before the intent stands: nothing was visible, and nothing will be. What fails here ends with its lease."""

        def one(shard: str) -> None:
            try:
                withdraw(self.log_of(shard), loads[shard])
            except HeadgateError:
                return  # the reason we are here is the one to tell

        self._each(one, sorted(loads))

    def _each(self, work: Callable[[str], Result], shards: Sequence[str]) -> list[Result]:
        return list(map_ordered(self.clock, work, list(shards), parallel=_SHARDS_AT_ONCE))


def attempt_owner(app: str) -> str:
    """Whose attempts its files are written under."""
    return f"load of {app}"


def _seen(intent: Intent, table_id: str | None) -> Intent:
    """An intent as a table sees it. One of a table that was dropped here, by somebody who was late, decides nothing about this one:

    t0 A announces · t1 the table is dropped, and another made in its place · t2 A creates its intent, among those of the new table
    """
    return intent if intent.table_id in (None, table_id) else intent.but(state="aborted", loads={})


def _check_query(app: str, query: str | None, others: set[str | None]) -> None:
    """The same version of another query has other rows: it is no other attempt at ours."""
    if others - {query}:
        raise TransactionConflictError(
            f"{app!r} is written by query {next(iter(others - {query}))}, and this is {query}",
            hint="a new checkpoint counts from 0 again: choose another appId, or go on with the old checkpoint",
        )


def _folder(app: str) -> str:
    return f"txn/{quote(app, safe='')}/"
