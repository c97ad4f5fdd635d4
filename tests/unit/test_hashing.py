"""Block hashes: the chain, the layouts in docs/hashing.md, extra keys, and what is refused."""

from __future__ import annotations

import hashlib
import re
import struct
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpager import hashing
from kvpager.attention import FullAttention
from kvpager.config import CacheConfig
from kvpager.errors import ConfigError, InvalidRequestError, KVPagerError
from kvpager.extra_keys import ContentKeys, ExtraKey, LoRA, MultiModalItem, PromptEmbeds, cache_salt_key
from kvpager.hashing import BlockHasher, root_hash
from model import block_hashes

HashBlocks = Callable[..., list[bytes]]

# Every test that hashes runs against the package and against the plain-Python model of it.
IMPLEMENTATIONS = [
    pytest.param(hashing.hash_blocks, id="package"),
    pytest.param(block_hashes.hash_blocks, id="model"),
]
each_implementation = pytest.mark.parametrize("hash_blocks", IMPLEMENTATIONS)
each_algorithm = pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])

PARENT = hashlib.sha256(b"some block").digest()
token_ids = st.integers(0, 2**32 - 1)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)


@st.composite
def contents(draw: st.DrawFn) -> ContentKeys:
    """Extra keys with texts from a tiny alphabet, so that equal texts of different kinds are common."""
    text = st.text("ab", min_size=1, max_size=3)
    lora = st.one_of(
        st.none(),
        st.builds(LoRA, name=text, version=text),
        st.builds(LoRA, name=text, digest=text.map(str.encode)),
        st.builds(LoRA, name=text, id=st.integers(0, 3)),
    )
    items: list[MultiModalItem] = []
    end = 0
    for gap, length, identifier in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), text), max_size=3)):
        items.append(MultiModalItem(identifier=identifier, offset=end + gap, length=length))
        end = items[-1].end
    return ContentKeys(lora=draw(lora), multimodal=tuple(items), cache_salt=draw(st.none() | text))


@each_implementation
class TestLayout:
    def test_plain_block_is_two_compressions(self, hash_blocks: HashBlocks) -> None:
        message = PARENT + struct.pack("<I16II", 16, *range(16), 0)
        assert len(message) <= 119
        assert hash_blocks(range(16), block_size=16, parent=PARENT) == [hashlib.sha256(message).digest()]

    def test_root_has_version_namespace_and_seed(self, hash_blocks: HashBlocks) -> None:
        magic = b"kvpager block hash\x01"
        assert root_hash() == hashlib.sha256(magic + b"\0\0\0\0").digest()
        assert root_hash(namespace="ab", seed="c") == hashlib.sha256(magic + b"\x02\0\0\0ab" + b"\x01\0\0\0c").digest()
        assert hash_blocks([5], block_size=1) == hash_blocks([5], block_size=1, parent=root_hash())

    def test_documented_examples(self, hash_blocks: HashBlocks) -> None:
        canonical, cbor = documented_examples()
        content = ContentKeys(
            lora=LoRA(name="sql", version="7"),
            multimodal=(MultiModalItem(identifier="cat.png", offset=3, length=2),),
            cache_salt="tenant-a",
        )
        root = root_hash(namespace="llama-3-8b/bf16")
        keys = content.for_blocks(0, 2, 4)
        assert canonical == [root, *hash_blocks(range(1, 10), block_size=4, parent=root, extra_keys=keys)]
        root = root_hash(seed="42", algorithm="sha256_cbor")
        tokens = [1, 2, 3, 4, 1000, 70000, 7, 8]
        options: dict[str, Any] = {"extra_keys": [(cache_salt_key("tenant-a"),), None], "algorithm": "sha256_cbor"}
        assert cbor == [root, *hash_blocks(tokens, block_size=4, parent=root, **options)]

    def test_cbor_integers_are_as_short_as_they_can_be(self, hash_blocks: HashBlocks) -> None:
        tokens = [0, 23, 24, 255, 256, 65535, 65536, 2**32 - 1]
        message = "83 5820" + PARENT.hex() + "88 00 17 1818 18ff 190100 19ffff 1a00010000 1affffffff f6"
        expected = hashlib.sha256(bytes.fromhex(message)).digest()
        assert hash_blocks(tokens, block_size=8, parent=PARENT, algorithm="sha256_cbor") == [expected]

    @pytest.mark.parametrize(("count", "head"), [(23, "97"), (24, "9818"), (256, "990100"), (65536, "9a00010000")])
    def test_cbor_array_heads(self, hash_blocks: HashBlocks, count: int, head: str) -> None:
        message = bytes.fromhex("83 5820" + PARENT.hex() + head) + b"\x07" * count + b"\xf6"
        hashes = hash_blocks([7] * count, block_size=count, parent=PARENT, algorithm="sha256_cbor")
        assert hashes == [hashlib.sha256(message).digest()]

    def test_cbor_extra_keys_are_flat_and_untagged(self, hash_blocks: HashBlocks) -> None:
        embeds = PromptEmbeds(values=np.arange(6, dtype=np.float32).reshape(3, 2))
        content = ContentKeys(
            lora=LoRA(name="l", id=1),
            multimodal=(MultiModalItem(identifier="é" * 12, offset=1, length=1),),
            cache_salt="s",
            prompt_embeds=embeds,
        )
        digests = [hashlib.sha256(embeds.values[a:b].tobytes()).hexdigest() for a, b in ((0, 2), (2, 3))]
        first = f"84 616c 82 7818 {('é' * 12).encode().hex()} 01 6173 5820 {digests[0]}"
        second = f"82 616c 5820 {digests[1]}"
        hashes = hash_blocks(
            [1, 2, 3, 4], block_size=2, parent=PARENT, extra_keys=content.for_blocks(0, 2, 2), algorithm="sha256_cbor"
        )
        expected = hashlib.sha256(bytes.fromhex(f"83 5820 {PARENT.hex()} 82 01 02 {first}")).digest()
        assert hashes[0] == expected
        assert hashes[1] == hashlib.sha256(bytes.fromhex(f"83 5820 {expected.hex()} 82 03 04 {second}")).digest()

    def test_cbor_offset_of_an_item_that_began_earlier_is_negative(self, hash_blocks: HashBlocks) -> None:
        item = MultiModalItem(identifier="i", offset=0, length=600)
        extra = [(item.extra_key(start),) for start in (0, 1, 24, 25, 300)]
        for keys, offset in zip(extra, ("00", "20", "37", "3818", "39012b"), strict=True):
            message = bytes.fromhex(f"83 5820 {PARENT.hex()} 81 01 81 82 6169 {offset}")
            hashes = hash_blocks([1], block_size=1, parent=PARENT, extra_keys=[keys], algorithm="sha256_cbor")
            assert hashes == [hashlib.sha256(message).digest()]


def documented_examples() -> list[list[bytes]]:
    """The hashes in docs/hashing.md, each checked against the message above it."""
    document = (Path(__file__).parents[2] / "docs" / "hashing.md").read_text()
    examples = []
    for text in re.findall(r"```text\n(.*?)```", document, re.DOTALL):
        hashes = []
        for message, digest in re.findall(r"message.*\n((?:[0-9a-f ]+\n)+)(?:root|block \d+)\n([0-9a-f]{64})\n", text):
            assert hashlib.sha256(bytes.fromhex(message)).hexdigest() == digest
            hashes.append(bytes.fromhex(digest))
        assert len(hashes) == 3
        examples.append(hashes)
    return examples


@each_implementation
@each_algorithm
class TestChain:
    @given(tokens=st.lists(token_ids, max_size=40), size=st.integers(1, 9), cut=st.integers(0, 40), content=contents())
    def test_in_parts_is_the_whole(
        self, hash_blocks: HashBlocks, algorithm: str, tokens: list[int], size: int, cut: int, content: ContentKeys
    ) -> None:
        def chain(first: int, last: int, parent: bytes) -> list[bytes]:
            part = tokens[first * size : last * size if last < count else None]
            keys = content.for_blocks(first, last - first, size)
            return list(hash_blocks(part, block_size=size, parent=parent, extra_keys=keys, algorithm=algorithm))

        count = len(tokens) // size
        cut = min(cut, count)
        whole = chain(0, count, PARENT)
        head = chain(0, cut, PARENT)
        assert len(whole) == count
        assert head + chain(cut, count, head[-1] if head else PARENT) == whole

    @given(tokens=st.lists(token_ids, min_size=1, max_size=20), index=st.integers(0, 19), other=token_ids)
    def test_a_token_changes_its_block_and_all_behind(
        self, hash_blocks: HashBlocks, algorithm: str, tokens: list[int], index: int, other: int
    ) -> None:
        index %= len(tokens)
        changed = [*tokens[:index], other, *tokens[index + 1 :]]
        one, two = (hash_blocks(t, block_size=2, parent=PARENT, algorithm=algorithm) for t in (tokens, changed))
        same = len(one) if other == tokens[index] else index // 2
        assert one[:same] == two[:same]
        assert not set(one[same:]) & set(two[same:])

    @pytest.mark.parametrize("count", [0, 1, 3])
    def test_no_full_block_no_hash(self, hash_blocks: HashBlocks, algorithm: str, count: int) -> None:
        assert hash_blocks([1] * count, block_size=4, parent=PARENT, algorithm=algorithm) == []

    def test_block_size_is_part_of_the_hash(self, hash_blocks: HashBlocks, algorithm: str) -> None:
        sizes = [hash_blocks([0] * 64, block_size=n, parent=PARENT, algorithm=algorithm)[-1] for n in (1, 2, 4, 64)]
        assert len(set(sizes)) == 4

    @given(values=st.lists(st.integers(0, 127), min_size=1, max_size=20))
    def test_every_kind_of_buffer_hashes_as_the_list(
        self, hash_blocks: HashBlocks, algorithm: str, values: list[int]
    ) -> None:
        def hashes(tokens: Any) -> list[bytes]:
            return hash_blocks(tokens, block_size=3, parent=PARENT, algorithm=algorithm)

        expected = hashes(values)
        for code in "bBhHiIlLqQ":
            assert hashes(array(code, values)) == expected
            assert hashes(memoryview(array(code, values))) == expected
        for dtype in ("i1", "u1", "<i2", ">i2", "<u2", "<i4", ">i4", "<u4", ">u4", "<i8", ">i8", "<u8", ">u8"):
            tokens = np.array(values, dtype)
            read_only = tokens.copy()
            read_only.flags.writeable = False
            strided = np.repeat(tokens, 3)[::3]
            for variant in (tokens, read_only, strided, tokens[::-1][::-1]):
                assert hashes(variant) == expected, dtype
        assert hashes(tuple(values)) == expected
        assert hashes([np.int64(value) for value in values]) == expected
        assert hashes(bytes(values)) == expected
        assert hashes(bytearray(values)) == expected

    @given(tokens=st.lists(token_ids, min_size=1, max_size=20))
    def test_large_ids(self, hash_blocks: HashBlocks, algorithm: str, tokens: list[int]) -> None:
        expected = hash_blocks(tokens, block_size=3, parent=PARENT, algorithm=algorithm)
        for dtype in (np.uint32, np.int64, np.uint64, ">u4"):
            assert hash_blocks(np.array(tokens, dtype), block_size=3, parent=PARENT, algorithm=algorithm) == expected


@each_implementation
class TestExtraKeys:
    @given(one=contents(), two=contents())
    def test_distinct_contents_have_distinct_hashes(
        self, hash_blocks: HashBlocks, one: ContentKeys, two: ContentKeys
    ) -> None:
        size, count = 4, 10
        keys = [content.for_blocks(0, count, size) or [()] * count for content in (one, two)]
        hashes = [hash_blocks([0] * 40, block_size=size, parent=PARENT, extra_keys=k) for k in keys]
        equal = True
        for index in range(count):
            equal = equal and described(keys[0][index]) == described(keys[1][index])
            assert (hashes[0][index] == hashes[1][index]) == equal

    def test_equal_text_of_different_kinds(self, hash_blocks: HashBlocks) -> None:
        embeds = PromptEmbeds(values=np.zeros((1, 1), np.float32))
        keys = [
            (),
            (cache_salt_key("x"),),
            (LoRA(name="x", version="x").extra_key,),
            (LoRA(name="x", digest=b"x").extra_key,),
            (LoRA(name="x", id=0).extra_key,),
            (MultiModalItem(identifier="x", offset=0, length=1).extra_key(0),),
            (embeds.extra_key(0, 1),),
            (LoRA(name="x", version="x").extra_key, cache_salt_key("x")),
            (cache_salt_key("xx"),),
        ]
        assert len({hash_blocks([1], block_size=1, parent=PARENT, extra_keys=[k])[0] for k in keys}) == len(keys)

    @given(name=texts, version=texts, other_name=texts, other_version=texts)
    def test_a_moved_boundary_between_name_and_version(
        self, hash_blocks: HashBlocks, name: str, version: str, other_name: str, other_version: str
    ) -> None:
        pairs = {(name, version), (other_name, other_version), (name + version[:1], version[1:] or "-")}
        keys = [(LoRA(name=n, version=v).extra_key,) for n, v in pairs]
        assert len({hash_blocks([1], block_size=1, extra_keys=[k])[0] for k in keys}) == len(pairs)

    @given(tokens=st.lists(token_ids, min_size=2, max_size=8), salt=texts)
    def test_a_key_is_never_mistaken_for_tokens(self, hash_blocks: HashBlocks, tokens: list[int], salt: str) -> None:
        key = cache_salt_key(salt)
        keyed = hash_blocks(tokens, block_size=len(tokens), parent=PARENT, extra_keys=[(key,)])[0]
        data = struct.pack("<BI", key.kind, len(key.payload)) + key.payload
        data += b"\0" * (-len(data) % 4)
        longer = [*tokens, *struct.unpack(f"<{len(data) // 4}I", data)]
        assert keyed != hash_blocks(longer, block_size=len(longer), parent=PARENT)[0]

    def test_adapters_identity(self, hash_blocks: HashBlocks) -> None:
        def hash_of(**adapter: Any) -> bytes:
            return hash_blocks([1], block_size=1, extra_keys=[(LoRA(**adapter).extra_key,)])[0]

        assert hash_of(name="a", version="1", id=1) == hash_of(name="a", version="1", id=2)
        assert hash_of(name="a", digest=b"d", version="1", id=1) == hash_of(name="b", digest=b"d")
        assert hash_of(name="a", version="1") != hash_of(name="a", version="2")
        assert hash_of(name="a", id=1) != hash_of(name="a", id=2)
        assert hash_of(name="a", id=1) != hash_of(name="b", id=1)

    def test_embeddings_differ_by_value_dtype_shape_and_mask(self, hash_blocks: HashBlocks) -> None:
        values = np.arange(8, dtype=np.uint16).reshape(4, 2)
        variants = [
            PromptEmbeds(values=values),
            PromptEmbeds(values=values + np.uint16(1)),
            PromptEmbeds(values=values.view(np.float16)),
            PromptEmbeds(values=values.astype(">u2").view(">u2")),
            PromptEmbeds(values=values.reshape(2, 4)),
            PromptEmbeds(values=values, mask=np.array([True, False, True, True])),
            PromptEmbeds(values=values, mask=np.array([False, True, True, True])),
        ]
        keys = [(embeds.extra_key(0, 4),) for embeds in variants]
        assert len({hash_blocks([0] * 4, block_size=4, extra_keys=[k])[0] for k in keys}) == len(variants)
        explicit = PromptEmbeds(values=np.asfortranarray(values), mask=np.ones(4, np.bool_))
        assert explicit.extra_key(0, 4) == variants[0].extra_key(0, 4)

    @pytest.mark.parametrize(
        ("extra_keys", "says"),
        [([], "0 entries for 1"), ([(), ()], "2 entries for 1"), ([("salt",)], "ExtraKey"), ([5], "ExtraKey")],
    )
    def test_refused(self, hash_blocks: HashBlocks, extra_keys: Any, says: str) -> None:
        with pytest.raises(InvalidRequestError, match=says):
            hash_blocks([1], block_size=1, extra_keys=extra_keys)


def described(keys: Sequence[ExtraKey]) -> list[object]:
    """What keys mean, written so that equality is plain Python's."""
    return [(key.kind, key.payload) for key in keys]


class TestContentKeys:
    def test_which_block_gets_what(self) -> None:
        content = ContentKeys(
            multimodal=(
                MultiModalItem(identifier="a", offset=2, length=4),
                MultiModalItem(identifier="b", offset=6, length=1),
                MultiModalItem(identifier="c", offset=12, length=4),
            ),
            cache_salt="s",
        )
        plain = [[key.plain for key in content.for_block(start, start + 4)] for start in range(0, 20, 4)]
        assert plain == [[("a", 2), "s"], [("a", -2), ("b", 2)], [], [("c", 0)], []]

    @given(content=contents(), size=st.integers(1, 7), first=st.integers(0, 6), count=st.integers(0, 6))
    def test_items_are_found_wherever_one_starts(self, content: ContentKeys, size: int, first: int, count: int) -> None:
        starts = range(first * size, (first + count) * size, size)
        one_by_one = [content.for_block(start, start + size) for start in starts]
        assert content.for_blocks(first, count, size) == (one_by_one if content else None)
        for start in starts:
            found = [k.plain for k in content.for_block(start, start + size) if isinstance(k.plain, tuple)]
            assert found == [
                (item.identifier, item.offset - start)
                for item in content.multimodal
                if item.offset < start + size and start < item.offset + item.length
            ]

    def test_nothing_but_tokens(self) -> None:
        assert ContentKeys().for_blocks(0, 5, 16) is None
        assert ContentKeys(cache_salt="s").for_blocks(1, 2, 4) == [(), ()]

    @pytest.mark.parametrize(
        ("make", "says"),
        [
            (lambda: LoRA(name=""), "LoRA.name"),
            (lambda: LoRA(name="a"), "neither version nor digest nor id"),
            (lambda: LoRA(name="a", version=""), "LoRA.version"),
            (lambda: LoRA(name="a", digest=b""), "LoRA.digest"),
            (lambda: LoRA(name="a", id=-1), "LoRA.id"),
            (lambda: LoRA(name="a\ud800", id=1), "UTF-8"),
            (lambda: MultiModalItem(identifier="", offset=0, length=1), "identifier"),
            (lambda: MultiModalItem(identifier="a", offset=-1, length=1), "offset"),
            (lambda: MultiModalItem(identifier="a", offset=0, length=0), "length"),
            (lambda: PromptEmbeds(values=np.zeros(3)), r"float64 \(3,\)"),
            (lambda: PromptEmbeds(values=[[1.0]]), "list"),  # type: ignore[arg-type]
            (lambda: PromptEmbeds(values=np.zeros((2, 2)), mask=np.ones(3, np.bool_)), "2 booleans"),
            (lambda: PromptEmbeds(values=np.zeros((2, 2)), mask=np.ones(2)), "booleans"),  # type: ignore[arg-type]
            (lambda: ContentKeys(cache_salt=""), "cache_salt"),
            (lambda: ContentKeys(lora="a"), "lora must be"),  # type: ignore[arg-type]
            (lambda: ContentKeys(multimodal=("a",)), r"multimodal\[0\]"),  # type: ignore[arg-type]
            (lambda: ContentKeys(prompt_embeds=np.zeros((2, 2))), "prompt_embeds"),  # type: ignore[arg-type]
            (
                lambda: ContentKeys(
                    multimodal=(
                        MultiModalItem(identifier="a", offset=2, length=3),
                        MultiModalItem(identifier="a", offset=4, length=3),
                    )
                ),
                "starts at token 4",
            ),
        ],
    )
    def test_refused(self, make: Callable[[], object], says: str) -> None:
        with pytest.raises(InvalidRequestError, match=says):
            make()


@each_implementation
@each_algorithm
class TestBadTokens:
    @pytest.mark.parametrize("bad", [-1, 2**32, 2**70, -(2**70)])
    @pytest.mark.parametrize("position", [0, 3, 4])
    def test_out_of_range(self, hash_blocks: HashBlocks, algorithm: str, bad: int, position: int) -> None:
        tokens = [1] * 5
        tokens[position] = bad
        with pytest.raises(InvalidRequestError, match=rf"token_ids\[{position}\] is {bad}; .* 0 to 4294967295"):
            hash_blocks(tokens, block_size=2, parent=PARENT, algorithm=algorithm)
        if abs(bad) < 2**63:
            with pytest.raises(InvalidRequestError, match=rf"token_ids\[{position}\] is {bad};"):
                hash_blocks(np.array(tokens), block_size=2, parent=PARENT, algorithm=algorithm)

    @pytest.mark.parametrize("bad", [1.0, True, "1", None, b"1", np.float32(1), np.bool_(True)])
    def test_not_an_integer(self, hash_blocks: HashBlocks, algorithm: str, bad: object) -> None:
        with pytest.raises(InvalidRequestError, match=r"token_ids\[1\] is .*; token ids are integers"):
            hash_blocks([1, bad], block_size=1, parent=PARENT, algorithm=algorithm)

    @pytest.mark.parametrize(
        "bad",
        [
            5,
            None,
            "123",
            {1: 2},
            iter([1]),
            np.zeros((2, 2), np.int32),
            np.zeros(2, np.float32),
            np.zeros(2, np.bool_),
            np.array(1),
            np.zeros(2, "datetime64[s]"),
            memoryview(array("d", [1.0])),
            np.array([1], object),
        ],
        ids=repr,
    )
    def test_not_token_ids_at_all(self, hash_blocks: HashBlocks, algorithm: str, bad: object) -> None:
        with pytest.raises(InvalidRequestError, match="token"):
            hash_blocks(bad, block_size=1, parent=PARENT, algorithm=algorithm)

    @pytest.mark.parametrize("parent", [b"", b"short", PARENT + b"x", "a" * 32, 7, bytearray(PARENT)])
    def test_parent(self, hash_blocks: HashBlocks, algorithm: str, parent: object) -> None:
        with pytest.raises(InvalidRequestError, match="parent must be"):
            hash_blocks([1], block_size=1, parent=parent, algorithm=algorithm)

    @pytest.mark.parametrize("size", [0, -1, 1.5, True, "16", 2**32, None])
    def test_block_size(self, hash_blocks: HashBlocks, algorithm: str, size: object) -> None:
        with pytest.raises(ConfigError, match=r"block.size"):
            hash_blocks([1], block_size=size, parent=PARENT, algorithm=algorithm)


class TestBlockHasher:
    def test_namespace_and_seed_separate_caches(self) -> None:
        options: list[dict[str, Any]] = [{}, {"namespace": "a"}, {"seed": "a"}, {"namespace": "a", "seed": "a"}]
        options += [{"namespace": "aa"}, {"seed": ""}, {"seed": "ab"}]
        assert len({BlockHasher(16, **option).root for option in options}) == len(options)
        assert BlockHasher(16, seed="a").root == BlockHasher(16, seed=b"a").root

    def test_equal_hashers_are_equal(self) -> None:
        assert BlockHasher(16, "m", "s") == BlockHasher(16, "m", "s")
        assert "secret" not in repr(BlockHasher(16, "m", "secret"))

    def test_cbor_without_seed_is_random(self) -> None:
        one, two = (BlockHasher(16, algorithm="sha256_cbor") for _ in range(2))
        assert one.root != two.root
        hashes = [hashing.hash_blocks([1] * 16, block_size=16, parent=hasher.root) for hasher in (one, one, two)]
        assert hashes[0] == hashes[1] != hashes[2]

    def test_for_config(self) -> None:
        specs = [FullAttention(block_size=32), FullAttention(block_size=48)]
        config = CacheConfig.uniform(10, specs, namespace="m")
        assert BlockHasher.for_config(config, seed="s") == BlockHasher(16, "m", "s")

    def test_extend_goes_on(self) -> None:
        hasher = BlockHasher(2)
        hashes = hasher.start()
        for count in (0, 1, 4, 5, 6):
            hasher.extend(hashes, range(1, 1 + count))
            assert hashes == hashing.hash_blocks(range(1, 1 + count), block_size=2, parent=hasher.root)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"hash_size": 0}, "hash_size of a hash must be an integer of at least 1"),
            ({"algorithm": "md5"}, "sha256, sha256_cbor"),
            ({"algorithm": None}, "unknown hash algorithm"),
            ({"namespace": b"a"}, "namespace"),
            ({"namespace": 5}, "namespace"),
            ({"namespace": "\ud800"}, "UTF-8"),
            ({"seed": 5}, "seed"),
            ({"algorithm": "sha256_cbor", "namespace": "m"}, "no place for a namespace"),
            ({"algorithm": "sha256_cbor", "seed": b"s"}, "string"),
            ({"algorithm": "sha256_cbor", "seed": "\ud800"}, "UTF-8"),
        ],
    )
    def test_refused(self, options: dict[str, Any], says: str) -> None:
        with pytest.raises(ConfigError, match=says) as error:
            BlockHasher(**{"hash_size": 16, **options})
        assert isinstance(error.value, KVPagerError)
        assert isinstance(error.value, ValueError)
