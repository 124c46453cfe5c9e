"""Scenes: short plays with a plot, beside the free play of ``run``.

Owns: what chance alone seldom arranges: an entry that vanishes, a WAL store wiped under a
stalled writer, two tables in one WAL store. Each still runs under the seed's faults and order.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from headgate.config import ShardWriterConfig
from headgate.errors import DataLossError, FencedError, HeadgateError, WalStoreMismatchError
from headgate.simulation.actors import RULES, Stage, archive_and_trim, collect_manifests, rows_of
from headgate.simulation.world import Process, SimClock, World
from headgate.wal.appender import EpochWriter, WalAppender
from headgate.wal.collect import collect_entries
from headgate.wal.fence import open_epoch
from headgate.writer import ShardWriter

_SOON_SECONDS = 60.0
_WAL_ONLY = ShardWriterConfig(enable_memtable=False, wal_persist_retry_base_delay=0.01)


def damage(world: World, stage: Stage, rng: random.Random) -> None:
    """An entry that later ones cover is lost or damaged: the next open says so, and writes nothing.

    Runs to its end before anything else, without faults: loss is what is on trial.
    """
    author = world.process("author", protected=True)

    def write() -> None:
        log = stage.log(author)
        appender = WalAppender(EpochWriter(log, open_epoch(log)), RULES)
        for number in stage.ledger.numbers(rng.randint(2, 4)):
            stage.ledger.acked[number] = appender.append([rows_of(number)])

    _run(world, author, write)  # and dies without a word: nothing of it is in the manifest
    space = stage.log(author).space(stage.latest())
    names = sorted(key for key in world.objects if key.startswith(space.folder) and len(world.objects[key]) > 1024)
    if len(names) < 2:
        return
    victim = rng.choice(names[:-1])
    whole = world.objects[victim]
    if rng.random() < 0.5:
        world.remove(victim)
    else:
        at = rng.randrange(len(whole))
        world.objects[victim] = whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
    world.note("damage", victim)
    before = dict(world.objects)
    victim_process = world.process("opener", protected=True)

    def open_it() -> None:
        try:
            ShardWriter(stage.log(victim_process), RULES, _WAL_ONLY).abort()
        except DataLossError as error:
            if error.object != victim:
                stage.ledger.problems.append(f"WRONG NAME: {victim} is damaged, and {error.object} was named")
        except HeadgateError as error:
            stage.ledger.problems.append(f"UNEXPECTED: opener: {error!r}")
        else:
            stage.ledger.problems.append(f"SILENT LOSS: {victim} was damaged, and the shard opened")

    _run(world, victim_process, open_it)
    if world.objects != before:
        changed = sorted(set(world.objects.items()) ^ set(before.items()))
        stage.ledger.problems.append(f"WROTE: a refused open wrote {[key for key, _ in changed][:3]}")
    world.remove(victim)
    world.apply(victim, whole)


_STEPS = ["fence.surveyed", "fence.claimed", "fence.before-seal", "fence.sealed", "fence.walked", "commit.loaded", "commit.created"]


def slow_claimant(world: World, stage: Stage, rng: random.Random) -> None:
    """A claimant stops between two steps while the world goes on: others claim, trim, collect. Then it wakes.

    Without faults, so that what happens is the order of steps and nothing else.
    """
    ledger = stage.ledger
    _run(world, author := world.process("author", protected=True), lambda: _append(stage, author, rng))
    slow = world.process("slow", protected=True)
    world.pause(slow, rng.choice(_STEPS), skip=rng.choice([0, 0, 0, 1]))

    def claim_and_write() -> None:
        try:
            with ShardWriter(stage.log(slow), RULES, _WAL_ONLY) as writer:
                order = ledger.order.setdefault("slow", [])
                acks = []
                for number in ledger.numbers(rng.randint(1, 2)):
                    order.append(number)
                    acks.append((number, writer.put(rows_of(number))))
                for number, ack in acks:
                    ledger.acked[number] = ack.wait()[stage.shard]
        except FencedError:
            return
        except HeadgateError as error:
            stage.open_problem("slow", error)

    task = slow.start(claim_and_write)
    world.scheduler.run(lambda: world.is_paused(slow) or task.done)
    others_claim = rng.random() < 0.5
    for number in range(rng.randint(1, 3)):
        other = world.process(f"other{number}", protected=True)

        def meanwhile(other: Process = other) -> None:
            if others_claim and rng.random() < 0.7:
                _append(stage, other, rng)
            if rng.random() < 0.8:
                archive_and_trim(stage, stage.log(other), rng, stop_chance=rng.choice([0.0, 0.3]))
            _collect_all(stage, other)

        _run(world, other, meanwhile)
    world.resume(slow)
    world.scheduler.run(lambda: task.done)
    slow.end()
    if rng.random() < 0.5:
        last = world.process("last", protected=True)
        _run(world, last, lambda: _collect_all(stage, last))


def _collect_all(stage: Stage, process: Process) -> None:
    collect_entries(stage.log(process), dry_run=False, sweep=True)
    collect_manifests(stage.log(process))


def _append(stage: Stage, process: Process, rng: random.Random) -> None:
    log = stage.log(process)
    appender = WalAppender(EpochWriter(log, open_epoch(log)), RULES)
    for number in stage.ledger.numbers(rng.randint(1, 4)):
        stage.ledger.acked[number] = appender.append([rows_of(number)])
    if rng.random() < 0.5:
        appender.close()


class Incumbent:
    """A writer that stays, and puts when told."""

    def __init__(self, world: World, stage: Stage) -> None:
        self._world, self._stage = world, stage
        self._wanted, self._written, self._end = 0, 0, False
        self._process = world.process("incumbent", protected=True)
        self.task = self._process.start(self._main)

    def _main(self) -> None:
        ledger, clock = self._stage.ledger, SimClock(self._process)
        order = ledger.order.setdefault("incumbent", [])
        try:
            writer = ShardWriter(self._stage.log(self._process), RULES, _WAL_ONLY)
        except FencedError:  # another claimant was there before us
            return
        while not self._end:
            while self._written < self._wanted and not self._end:
                number = ledger.numbers(1)[0]
                order.append(number)
                try:
                    ledger.acked[number] = writer.put(rows_of(number)).wait()[self._stage.shard]
                    self._written += 1
                except FencedError as error:
                    ledger.fenced.append((error.epoch, error.position, number))
                    self._end = True
            clock.sleep(0.2)
        writer.abort()

    def put(self, count: int) -> None:
        """Let it put, and wait until it has, or is fenced."""
        self._wanted += count
        self._world.scheduler.run(lambda: self.task.done or self._written >= self._wanted)

    def stop(self) -> None:
        self._end = True
        self._world.scheduler.run(lambda: self.task.done)


def dies_after_its_seal(world: World, stage: Stage, rng: random.Random) -> None:
    """A claimant seals and dies before it says so in the manifest; the log is trimmed past the seal."""
    incumbent = Incumbent(world, stage)
    incumbent.put(rng.randint(1, 2))
    claimant = world.process("claimant", protected=True)
    world.pause(claimant, "fence.sealed")
    claiming = claimant.start(lambda: _claim_and_put(stage, claimant, rng))
    world.scheduler.run(lambda: world.is_paused(claimant) or claiming.done)
    incumbent.put(1)
    claimant.end()
    trimmer = world.process("trimmer", protected=True)

    def trim_some() -> None:
        archive_and_trim(stage, stage.log(trimmer), rng, stop_chance=rng.choice([0.0, 0.3]))
        _collect_all(stage, trimmer)

    _run(world, trimmer, trim_some)
    incumbent.stop()


def several_seals(world: World, stage: Stage, rng: random.Random) -> None:
    """A slow claimant seals what was collected under it, while the incumbent goes on: an epoch with two seals."""
    incumbent = Incumbent(world, stage)
    put = incumbent.put
    put(rng.randint(0, 1))
    slow = world.process("slow", protected=True)
    world.pause(slow, "fence.claimed")

    def claim() -> None:
        try:
            ShardWriter(stage.log(slow), RULES, _WAL_ONLY).close()
        except HeadgateError as error:
            stage.open_problem("slow", error)

    claiming = slow.start(claim)
    world.scheduler.run(lambda: world.is_paused(slow) or claiming.done)
    third = world.process("third", protected=True)
    claiming_too = None
    if rng.random() < 0.5:  # another claimant, who may meet the first one's seal
        world.pause(third, "fence.claimed")
        claiming_too = third.start(lambda: _claim_and_put(stage, third, rng))
        world.scheduler.run(lambda: world.is_paused(third) or claiming_too.done)
    put(rng.randint(1, 3))
    trimmer = world.process("trimmer", protected=True)

    def trim_all() -> None:
        archive_and_trim(stage, stage.log(trimmer), rng, stop_chance=0.0)
        _collect_all(stage, trimmer)

    _run(world, trimmer, trim_all)
    world.resume(slow)
    world.pause(slow, "fence.sealed")
    world.scheduler.run(lambda: world.is_paused(slow) or claiming.done)
    put(rng.randint(0, 2))
    sweeper = world.process("sweeper", protected=True)
    _run(world, sweeper, lambda: _collect_all(stage, sweeper))
    world.resume(slow)
    if claiming_too is not None:
        if rng.random() < 0.5:
            world.scheduler.run(lambda: claiming.done)
        world.resume(third)
        world.scheduler.run(lambda: claiming_too.done)
    put(1)
    world.scheduler.run(lambda: claiming.done)
    incumbent.stop()


def _claim_and_put(stage: Stage, process: Process, rng: random.Random) -> None:
    try:
        with ShardWriter(stage.log(process), RULES, _WAL_ONLY) as writer:
            for number in stage.ledger.numbers(rng.randint(1, 2)):
                stage.ledger.acked[number] = writer.put(rows_of(number)).wait()[stage.shard]
    except HeadgateError as error:
        stage.open_problem(process.name, error)


def gap(world: World, stage: Stage, rng: random.Random) -> None:
    """A writer dies with a gap among its PUTs: later ones have landed, an earlier one never does, or does too late."""
    writer_process = world.process("gappy", protected=True)
    held_position = rng.randint(0, 3)
    config = ShardWriterConfig(enable_memtable=False, max_inflight=4, max_wal_buffer_size=1)
    landed: set[int] = set()

    def write() -> None:
        ledger, order = stage.ledger, stage.ledger.order.setdefault("gappy", [])
        writer = ShardWriter(stage.log(writer_process), RULES, config)
        space = writer._writer.claim.space
        world.held = space.key(writer.epoch, writer.wal_stats().next_wal_entry_position + held_position)
        acks = []
        for number in ledger.numbers(8):
            order.append(number)
            acks.append((number, writer.put(rows_of(number))))
        for number, ack in acks:
            ledger.acked[number] = ack.wait()[stage.shard]
            landed.add(number)

    task = writer_process.start(write)
    steps = world.scheduler.steps + rng.choice([100, 200, 400])
    world.scheduler.run(lambda: task.done or world.scheduler.steps >= steps)
    world.note(writer_process.name, "dies")
    writer_process.end()
    if rng.random() < 0.5:
        world.drop_held()
    world.held = None


def crowd(world: World, stage: Stage, rng: random.Random) -> None:
    """Threads of one writer put and wait, several in an entry, and wake each other. Somebody may take over meanwhile."""
    process = world.process("crowd", protected=True)
    config = ShardWriterConfig(enable_memtable=False, max_inflight=rng.choice([1, 2, 4]), wal_persist_retry_base_delay=0.01)

    def put_some(writer: ShardWriter, name: str) -> None:
        ledger, order = stage.ledger, stage.ledger.order.setdefault(name, [])
        try:
            for number in ledger.numbers(rng.randint(1, 3)):
                order.append(number)
                ack = writer.put(rows_of(number))
                if rng.random() < 0.8:
                    ledger.acked[number] = ack.wait()[stage.shard]
        except HeadgateError as error:
            stage.open_problem(name, error)

    def write_together() -> None:
        clock = SimClock(process)
        try:
            writer = ShardWriter(stage.log(process), RULES, config)
        except HeadgateError as error:
            stage.open_problem(process.name, error)
            return
        names = [f"crowd{number}" for number in range(rng.randint(2, 5))]
        threads = [clock.spawn(lambda name=name: put_some(writer, name), name=name) for name in names]  # type: ignore[misc]
        for thread in threads:
            thread.join(_SOON_SECONDS)
        if any(thread.is_alive() for thread in threads):
            stage.ledger.problems.append("FORGOTTEN: a thread waits for a put that is decided")
        writer.abort()

    task = process.start(write_together)
    if rng.random() < 0.4:
        heir = world.process("heir", protected=True)
        _run(world, heir, lambda: _claim_and_put(stage, heir, rng))
    world.scheduler.run(lambda: task.done)
    process.end()


def swap(world: World, stage: Stage, rng: random.Random) -> None:
    """Another WAL store: refused while the log is needed, taken when clean; whoever sleeps in the old one stays fenced."""
    _run(world, author := world.process("author", protected=True), lambda: _append(stage, author, rng))
    before = dict(world.objects)
    stage.wal_elsewhere = "other/"
    wrong = world.process("wrong", protected=True)

    def open_wrong() -> None:
        try:
            ShardWriter(stage.log(wrong), RULES, _WAL_ONLY).abort()
        except WalStoreMismatchError:
            return
        except HeadgateError as error:
            stage.ledger.problems.append(f"UNEXPECTED: wrong: {error!r}")
        else:
            stage.ledger.problems.append("WRONG STORE: a WAL store without the log was accepted")

    _run(world, wrong, open_wrong)
    if world.objects != before:
        stage.ledger.problems.append("WROTE: a refused open wrote")
    stage.wal_elsewhere = None
    _wake_a_sleeper_after(world, stage, rng, lambda: setattr(stage, "wal_elsewhere", "other/"))


def wipe(world: World, stage: Stage, rng: random.Random) -> None:
    """The WAL store is wiped while clean, with a writer fenced long ago still asleep somewhere."""

    def empty() -> None:
        for key in [key for key in world.objects if key.startswith("wal/")]:
            world.remove(key)
        world.note("wipe", "the WAL store is empty")

    _wake_a_sleeper_after(world, stage, rng, empty)


def _wake_a_sleeper_after(world: World, stage: Stage, rng: random.Random, event: Callable[[], None]) -> None:
    """A writer sleeps; an heir fences it, gives up the log and closes; the event; a next writer; then the sleeper wakes."""
    sleeper = world.process("sleeper", protected=True)
    asleep = {"yet": False, "done": False}

    def sleep_and_wake() -> None:
        ledger, clock = stage.ledger, SimClock(sleeper)
        writer = ShardWriter(stage.log(sleeper), RULES, _WAL_ONLY)
        order = ledger.order.setdefault("sleeper", [])
        for number in ledger.numbers(rng.randint(0, 2)):
            order.append(number)
            ledger.acked[number] = writer.put(rows_of(number)).wait()[stage.shard]
        asleep["yet"] = True
        while not asleep["done"]:
            clock.sleep(0.5)
        number = ledger.numbers(1)[0]
        order.append(number)
        try:
            ledger.acked[number] = writer.put(rows_of(number)).wait()[stage.shard]
        except HeadgateError:
            pass
        writer.abort()

    sleeping = sleeper.start(sleep_and_wake)
    world.scheduler.run(lambda: asleep["yet"] or sleeping.done)

    heir = world.process("heir", protected=True)

    def take_over_and_clean_up() -> None:
        ledger = stage.ledger
        with ShardWriter(stage.log(heir), RULES, _WAL_ONLY) as writer:
            for number in ledger.numbers(rng.randint(0, 2)):
                ledger.acked[number] = writer.put(rows_of(number)).wait()[stage.shard]
            writer.flush()
            archive_and_trim(stage, stage.log(heir), rng, stop_chance=0.0)

    _run(world, heir, take_over_and_clean_up)
    if stage.latest().wal.clean_at is None:
        stage.ledger.problems.append("NOT CLEAN: everything was given up and the writer closed")
        return
    event()
    next_process = world.process("next", protected=True)

    def open_next() -> None:
        ledger = stage.ledger
        with ShardWriter(stage.log(next_process), RULES, _WAL_ONLY) as writer:
            for number in ledger.numbers(rng.randint(0, 2)):
                ledger.acked[number] = writer.put(rows_of(number)).wait()[stage.shard]

    _run(world, next_process, open_next)
    asleep["done"] = True
    world.scheduler.run(lambda: sleeping.done)


def _run(world: World, process: Process, main: Callable[[], None]) -> None:
    task = process.start(main)
    world.scheduler.run(lambda: task.done)
    process.end()


Scene = Callable[[World, Stage, random.Random], None]

SCENES: dict[str, Scene] = {
    "crowd": crowd,
    "damage": damage,
    "dies_after_its_seal": dies_after_its_seal,
    "gap": gap,
    "several_seals": several_seals,
    "slow_claimant": slow_claimant,
    "swap": swap,
    "wipe": wipe,
}
