"""A legacy MCP server on the official Python SDK, version 1, for the tests.

Prints one JSON line per event on stdout: first `{"event":"listening","url":…}`, later `cancelled`,
`busy`, `get` and `delete`. The tool `busy` never reaches the SDK: its HTTP exchange is answered 429
with `Retry-After: 7`, as a rate limiter in front of a server does.
"""

import asyncio
import json
import socket

import uvicorn
from mcp.server.fastmcp import Context, FastMCP
from mcp.types import SamplingMessage, TextContent, ToolAnnotations
from pydantic import BaseModel

server = FastMCP("python-server-v1")


def event(name: str, **fields: object) -> None:
    print(json.dumps({"event": name, **fields}), flush=True)


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
async def count(steps: int, ctx: Context) -> str:
    """Reports progress `steps` times."""
    for step in range(1, steps + 1):
        await ctx.report_progress(step, steps, f"step {step}")
        await asyncio.sleep(0.02)  # the tool's own work
    return "counted"


@server.tool()
async def wait(ctx: Context) -> str:
    """Reports progress once, then works until it is cancelled."""
    try:
        await ctx.report_progress(1, 2)
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        event("cancelled")
        raise
    return "never"


@server.tool()
def busy() -> str:
    """Is answered 429 before it gets here."""
    return "not busy"


@server.tool()
async def announce(ctx: Context) -> str:
    """Says on the notification stream that the tools have changed."""
    await ctx.session.send_tool_list_changed()
    return "announced"


class Person(BaseModel):
    name: str


@server.tool()
async def ask(ctx: Context) -> str:
    """Asks the client's user for a name, then its model for a greeting."""
    answer = await ctx.elicit("Who is there?", Person)
    greeting = await ctx.session.create_message(
        [SamplingMessage(role="user", content=TextContent(type="text", text=f"Greet {answer.data.name}."))],
        max_tokens=20,
        related_request_id=ctx.request_id,
    )
    return f"{answer.data.name}: {greeting.content.text}"


class Front:
    """Answers `busy` with 429 and tells what arrives; everything else goes to the SDK."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["method"] != "POST":
            event(scope["method"].lower())
            return await self.app(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        sent = json.loads(body)
        if sent.get("method") == "tools/call" and sent["params"].get("name") == "busy":
            event("busy")
            headers = [(b"retry-after", b"7"), (b"content-type", b"text/plain"), (b"content-length", b"9")]
            await send({"type": "http.response.start", "status": 429, "headers": headers})
            return await send({"type": "http.response.body", "body": b"slow down"})
        replayed = False

        async def again():
            nonlocal replayed
            if replayed:
                return await receive()
            replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, again, send)


# The protocol is named, since asyncio sends without delay only where it finds it.
listener = socket.socket(proto=socket.IPPROTO_TCP)
listener.bind(("127.0.0.1", 0))
listener.listen()
event("listening", url=f"http://127.0.0.1:{listener.getsockname()[1]}/mcp")
uvicorn.Server(uvicorn.Config(Front(server.streamable_http_app()), log_level="warning")).run(sockets=[listener])
