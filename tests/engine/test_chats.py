"""Files of prompts: what they may say, and what is said of those that can't be read."""

from __future__ import annotations

import pytest

from kvpager.engine import SamplingParams
from kvpager.engine.chats import default_prompts, parse_prompts
from kvpager.errors import TraceError


class NoChats:
    chat_template = None


class Chats:
    chat_template = "…"

    def apply_chat_template(self, turns: list[dict[str, str]], **options: bool) -> list[int]:
        assert options == {"add_generation_prompt": True, "return_dict": False}
        return [len(turn["content"]) for turn in turns]


def test_text_and_chats() -> None:
    lines = [
        b'{"prompt": "Once upon a time", "max_tokens": 5, "seed": 3}\n',
        b"\n",
        b'{"messages": [{"role": "system", "content": "abc"}, {"role": "user", "content": "Hi"}],"temperature": 0.5}\n',
    ]
    text, chat = parse_prompts(lines, "p.jsonl")
    assert (text.title, text.encoded(NoChats())) == ("Once upon a time", "Once upon a time")
    assert (chat.title, chat.encoded(Chats())) == ("Hi", [3, 2])
    defaults = SamplingParams(max_tokens=9, top_p=0.5)
    assert text.params(defaults) == SamplingParams(max_tokens=5, top_p=0.5, seed=3)
    assert chat.params(defaults) == SamplingParams(max_tokens=9, top_p=0.5, temperature=0.5)
    with pytest.raises(TraceError, match="no chat template"):
        chat.encoded(NoChats())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2"),
        (b'{"prompts": "x"}', "prompts"),
        (b'{"prompt": "x", "messages": []}', "either prompt or messages"),
        (b"{}", "either prompt or messages"),
        (b'{"prompt": "x", "max_tokens": 0}', ">= 1"),
        (b'{"prompt": 3}', "str"),
    ],
)
def test_lines_that_cannot_be_read(line: bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        parse_prompts([b'{"prompt": "fine"}\n', line], "p.jsonl")
    assert str(caught.value).startswith("p.jsonl, line 2: ")


def test_a_file_without_prompts() -> None:
    with pytest.raises(TraceError, match="no prompts"):
        parse_prompts([b"\n"], "p.jsonl")


def test_the_default_chats_share_their_system_prompt() -> None:
    prompts = default_prompts()
    assert len(prompts) == 12
    assert len({prompt.messages[0].content for prompt in prompts if prompt.messages}) == 1
    assert len({prompt.title for prompt in prompts}) == 12
