"""Lines of a job's results, in the format of its API.

Source: OpenAI API reference, "Batch", "The request output object"; Anthropic API reference, "Message Batches",
"Retrieve message batch results".
"""

from __future__ import annotations

import msgspec

from router.batches.answers import How
from router.batches.job import Api
from router.batches.line_call import LineReply
from router.batches.one_line import without_breaks

_NOT_RUN = {
    "expired": ("batch_expired", "This request could not be executed before the batch expired."),
    "canceled": ("batch_cancelled", "The batch was cancelled before this request executed."),
}
"""OpenAI's codes and words for lines that did not run."""


def answered(api: Api, call: str, custom_id: str, reply: LineReply) -> tuple[How, bytes]:
    """How a line ended, and its line, once the call of this id was answered."""
    how: How = "succeeded" if reply.status == 200 else "errored"
    body = msgspec.Raw(reply.body)
    if api == "openai":
        response = {"status_code": reply.status, "request_id": call, "body": body}
        return how, _openai(call, custom_id, response=response)
    what = {"type": "succeeded", "message": body} if how == "succeeded" else {"type": "errored", "error": body}
    return how, _encode({"custom_id": custom_id, "result": what})


def not_run(api: Api, call: str, custom_id: str, how: How) -> bytes:
    """The line of a request that was not answered."""
    if api == "anthropic":
        return _encode({"custom_id": custom_id, "result": {"type": how}})
    code, message = _NOT_RUN[how]
    return _openai(call, custom_id, error={"code": code, "message": message})


def _encode(line: object) -> bytes:
    return without_breaks(msgspec.json.encode(line))


def _openai(call: str, custom_id: str, *, response: object = None, error: object = None) -> bytes:
    return _encode({"id": f"batch_req_{call}", "custom_id": custom_id, "response": response, "error": error})
