"""What verl loads as a file of tools: one that answers with a text, with images, or with both, and a parser by which a
model without words calls it.

    actor_rollout_ref.rollout.multi_turn.function_tool_path=pictures_tools.py
    actor_rollout_ref.rollout.multi_turn.format=by_letters
"""

import json

import PIL.Image
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

ENDS = range(64, 112)  # tokens that end a turn: bytes, in the tests' vocabulary
SIZE = (24, 16)  # of every image: the processors take those of one size together


def image(number: int) -> PIL.Image.Image:
    """In one of the modes that tools save in: with colours, grey, with transparency, with a palette."""
    pixels = bytes((number * 37 + i * (7 + number % 5)) % 256 for i in range(4 * SIZE[0] * SIZE[1]))
    made = PIL.Image.frombytes("RGBA", SIZE, pixels)
    mode = ("RGB", "L", "RGBA", "P")[number % 4]
    return made if mode == "RGBA" else made.convert("RGB").convert(mode)


@function_tool
def look(number: int) -> ToolResponse:
    """Shows something.

    Args:
        number: What is shown.
    """
    images = [image(number + i) for i in range(number % 3)]
    text = {} if number % 3 == 1 else {"text": f"number {number}"}
    return ToolResponse(**text, **({"image": images} if images else {}))


@ToolParser.register("by_letters")
class ByLetters(ToolParser):
    """A call for most turns, of a number that the turn's tokens say."""

    @property
    def stop_token_ids(self) -> list[int]:
        return list(ENDS)

    async def extract_tool_calls(self, responses_ids, tools=None):
        text, number = self.tokenizer.decode(responses_ids), sum(responses_ids) % 12
        calls = [FunctionCall(name="look", arguments=json.dumps({"number": number}))]
        return text, [] if sum(responses_ids) % 7 == 0 else calls
