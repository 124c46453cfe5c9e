"""The Store contract, the same for memory, disk, S3 and Azure (S05)."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headgate.clock import SYSTEM_CLOCK
from headgate.errors import InvalidInputError, ObjectExistsError, ObjectMissingError, StoreError, UnsupportedStoreError
from headgate.store import Location, Store, probe

pytestmark = pytest.mark.timeout(600)  # the first test that needs Azurite may have to fetch it

SIZES = (0, 1, 64 << 10, 9 << 20)


def keys(store: Store, prefix: str = "", start_after: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, start_after=start_after)]


def test_s05_a_name_is_created_once_and_keeps_its_first_bytes(place):
    store = place.store()
    store.create("a/b", b"first")

    with pytest.raises(ObjectExistsError):
        store.create("a/b", b"second")

    assert bytes(store.get("a/b")) == b"first"


def test_s05_what_is_not_there_is_missing_and_not_unavailable(place):
    store = place.store()
    store.create("a/b", b"x")

    for ask in (store.get, store.head, lambda key: store.get_range(key, 0, 1)):
        for key in ("a/c", "c", "a/b/c"):
            with pytest.raises(ObjectMissingError):
                ask(key)
    assert keys(store, "c/") == []


@pytest.mark.parametrize("size", SIZES)
def test_s05_bytes_come_back_as_they_went_in(place, size):
    store, body = place.store(), os.urandom(size)

    store.create("body", memoryview(body))

    assert bytes(store.get("body")) == body
    assert store.head("body").size_bytes == size
    assert [(info.key, info.size_bytes) for info in store.list("")] == [("body", size)]


def test_s05_a_range_is_cut_at_the_end_and_empty_beyond_it(place):
    store = place.store()
    store.create("ten", b"0123456789")
    store.create("none", b"")

    ranges = {(0, 10): b"0123456789", (0, 4): b"0123", (4, 3): b"456", (8, 5): b"89", (9, 1): b"9"}
    ranges |= {(10, 1): b"", (11, 5): b"", (3, 0): b"", (1000, 0): b""}

    assert {asked: bytes(store.get_range("ten", *asked)) for asked in ranges} == ranges
    assert bytes(store.get_range("none", 0, 16)) == b""


def test_s05_a_listing_is_in_order_and_starts_after_any_name(place):
    store = place.store()
    names = ["a/1.json", "a/10.json", "a/2.json", "a/b/1", "a/b/2", "a/b.x", "a/c/9/z", "ab/1", "b/1", "z"]
    for name in names:
        store.create(name, name.encode())
    inside = sorted(name for name in names if name.startswith("a/"))

    assert keys(store) == sorted(names)
    assert keys(store, "a/") == inside
    assert keys(store, "a/b/") == ["a/b/1", "a/b/2"]
    for bound in [*names, "a/", "a/0", "a/b", "a/b/", "a/b/1x", "a/zzz", "0", "zz"]:
        assert keys(store, "a/", bound) == [name for name in inside if name > bound], bound
        assert keys(store, "", bound) == [name for name in sorted(names) if name > bound], bound


def test_s05_a_listing_goes_past_a_page(place):
    store, count = place.store(), 1103
    names = [f"many/{number:020d}.arrow" for number in range(count)]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: store.create(name, b"x"), names))

    assert keys(store, "many/") == names
    assert keys(store, "many/", names[50]) == names[51:]
    assert keys(store, "many/", names[-2]) == names[-1:]

    store.delete(names[:1050])
    assert keys(store) == names[1050:]


def test_s05_deleting_counts_a_missing_one_as_deleted(place):
    store = place.store()
    for name in ("d/1", "d/2", "d/3"):
        store.create(name, b"x")

    store.delete(["d/0", "d/1", "e", "d/3"])
    store.delete([])
    store.delete(["d/1"])

    assert keys(store) == ["d/2"]
    store.create("d/1", b"again")
    assert bytes(store.get("d/1")) == b"again"


def test_s05_of_eight_creates_of_one_name_one_wins(racing_place):
    store, rounds, clients = racing_place.store(), 12, 8
    for number in range(rounds):
        key, begin, won = f"race/{number}", threading.Barrier(clients), []

        def create(client: int, key: str = key, begin: threading.Barrier = begin, won: list[int] = won) -> None:
            begin.wait(30)
            try:
                store.create(key, b"%d" % client)
                won.append(client)
            except ObjectExistsError:
                pass

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(create, range(clients)))

        assert len(won) == 1
        assert bytes(store.get(key)) == b"%d" % won[0]


ODD_PREFIXES = (
    "plain",
    "plain2",
    "plain/below",
    "with space",
    "with%20space",
    "with+space",
    "100%",
    "100%25",
    "ünïcode/日本",
    "u\u0308nïcode",
    "quote'd",
    "tilde~",
    "st*r",
    "br[ack]et{s}",
    "caret^pipe|",
    "a=b&c;d,e$f!g(h)",
    "dots...",
)


def test_r15_any_prefix_is_a_place_of_its_own(place):
    stores = {prefix: place.store(f"odd/{prefix}") for prefix in ODD_PREFIXES}
    for prefix, store in stores.items():
        store.create("wal/x/1.arrow", prefix.encode())

    for prefix, store in stores.items():
        assert bytes(store.get("wal/x/1.arrow")).decode() == prefix
        assert keys(store, "wal/") == ["wal/x/1.arrow"], prefix
        assert keys(store, "wal/x/", "wal/x/1.arrow") == [], prefix
    # Only a prefix that is a folder of another one sees it.
    assert keys(stores["plain"]) == ["below/wal/x/1.arrow", "wal/x/1.arrow"]
    assert keys(stores["plain2"]) == ["wal/x/1.arrow"]
    stores["with space"].delete(["wal/x/1.arrow"])
    assert keys(stores["with%20space"]) == ["wal/x/1.arrow"]


def test_r15_azure_takes_a_backslash_for_a_slash_so_it_is_refused():
    with pytest.raises(InvalidInputError):
        Location.parse("az://bucket/back\\slash")
    assert Location.parse("s3://bucket/back\\slash").path == "back\\slash"


@pytest.mark.parametrize("spelling", ["{}/", "{}//", "{}"])
def test_r15_a_slash_at_the_end_changes_nothing(place, spelling):
    place.store("slashes").create("a/b", b"x")

    store = Location.parse(spelling.format(place.uri("slashes")), place.options).open()

    assert keys(store) == ["a/b"]
    assert store.uri == place.store("slashes").uri


def test_s05_the_probe_accepts_the_store_and_leaves_nothing(place):
    store = place.store()

    probe(store, SYSTEM_CLOCK)

    assert keys(store) == []


def test_s01_the_probe_refuses_a_store_that_creates_twice(s3):
    careless = Location.parse(s3.uri("careless"), {**s3.options, "aws_conditional_put": "disabled"})

    with pytest.raises((UnsupportedStoreError, StoreError)):
        probe(careless.open(), SYSTEM_CLOCK)


def test_a_location_pickles_and_opens_the_same_store(place):
    place.store().create("a", b"x")
    location = Location.parse(place.uri(), place.options)

    again = pickle.loads(pickle.dumps(location))

    assert again == location
    assert bytes(again.open().get("a")) == b"x"


def test_a_store_pickles(place):
    if place.kind == "memory":
        pytest.skip("what is in memory is reached by its location")
    store = place.store()
    store.create("a", b"x")

    again = pickle.loads(pickle.dumps(store))

    assert again.uri == store.uri
    assert bytes(again.get("a")) == b"x"


@pytest.mark.parametrize("server", ["s3", "azure"])
def test_s04_no_secret_in_what_a_store_says(request, server):
    where = request.getfixturevalue(server)
    secret = "c2VjcmV0LXRoYXQtbm9ib2R5LXNlZXM="
    name = "aws_secret_access_key" if server == "s3" else "azure_storage_account_key"
    options = {**where.options, name: secret, "timeout": "2s"}
    store = Location.parse(where.uri("x"), options).open()
    gone = Location.parse(f"{where.scheme}://no-such-bucket/x", options).open()

    said = [repr(store), str(store.uri), repr(vars(store))]
    for ask in (lambda s: s.get("k"), lambda s: s.create("k/k", b""), lambda s: list(s.list("")), lambda s: s.delete(["k"])):
        for one in (store, gone):
            try:
                ask(one)
            except StoreError as error:
                said += [repr(error), str(error), repr(vars(error))]

    assert len(said) > 5
    assert not any(secret in text for text in said)


def test_a_missing_bucket_is_named_as_such(s3):
    store = Location.parse("s3://no-such-bucket/x", s3.options).open()

    with pytest.raises(StoreError) as caught:
        store.create("k", b"x")

    assert "bucket" in caught.value.hint
    assert not isinstance(caught.value, ObjectMissingError)


def test_options_that_the_store_does_not_know_are_refused(s3):
    with pytest.raises(InvalidInputError):
        Location.parse(s3.uri("x"), {**s3.options, "aws_no_such_thing": "1"}).open()


def test_s05_a_large_create_is_one_conditional_request(proxy):
    store = Location.parse(proxy.server.uri("one-request"), proxy.server.options).open()
    proxy.requests.clear()

    store.create("large", os.urandom(9 << 20))

    assert [(request.method, request.query, request.headers.get("if-none-match")) for request in proxy.requests] == [("PUT", "", "*")]
