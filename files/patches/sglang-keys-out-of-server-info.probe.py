"""Passes when what GET /server_info answers holds the engine's arguments, but not its API keys."""

import asyncio
import dataclasses
from types import SimpleNamespace

from sglang.srt.entrypoints import http_server
from sglang.srt.server_args import ServerArgs


async def internal_states():
    return [dict(vars(arguments))]  # as the schedulers answer


arguments = object.__new__(ServerArgs)  # without the checks of a real start, which want a model
for field in dataclasses.fields(ServerArgs):
    setattr(arguments, field.name, None)
arguments.model_path, arguments.api_key, arguments.admin_api_key = "a-model", "key-one", "key-two"
manager = SimpleNamespace(server_args=arguments, get_internal_state=internal_states)
http_server.set_global_state(SimpleNamespace(tokenizer_manager=manager, scheduler_info={}))
answer = repr(asyncio.run(http_server.server_info()))
assert "a-model" in answer, "the answer is another than it was"
assert "key-one" not in answer and "key-two" not in answer, "an API key is in the answer"
