"""An MCP server of both eras on the official Python SDK, for the tests.

Its legacy streams can be resumed. Prints one JSON line per event on stdout: first
`{"event":"listening","url":…}`, later `cancelled`, `busy`, `get`, `resume` (a GET with
`Last-Event-ID`), `listen` and `delete`. The tool `busy` never reaches the SDK: its HTTP exchange is
answered 429 with `Retry-After: 7`, as a rate limiter in front of a server does.
"""

import asyncio
import json
import socket
from typing import Annotated

import uvicorn
from mcp.server.mcpserver import Context, Elicit, MCPServer, Resolve, Sample
from mcp.server.streamable_http import EventMessage, EventStore
from mcp.types import CreateMessageResult, SamplingMessage, TextContent, ToolAnnotations
from pydantic import BaseModel

server = MCPServer("python-server", version="1.0")


def event(name: str, **fields: object) -> None:
    print(json.dumps({"event": name, **fields}), flush=True)


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
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
    await ctx.notify_tools_changed()
    return "announced"


class Person(BaseModel):
    name: str


def person() -> Elicit[Person]:
    return Elicit("Who is there?", Person)


def greeting(to: Annotated[Person, Resolve(person)]) -> Sample:
    return Sample([SamplingMessage(role="user", content=TextContent(text=f"Greet {to.name}."))], max_tokens=20)


@server.tool()
def ask(
    to: Annotated[Person, Resolve(person)], sampled: Annotated[CreateMessageResult, Resolve(greeting)]
) -> str:
    """Asks the client's user for a name, then its model for a greeting, in the way of the era."""
    return f"{to.name}: {sampled.content.text}"


@server.tool()
async def resume(ctx: Context) -> str:
    """Ends its own stream before it answers."""
    await ctx.close_sse_stream()
    return "resumed"


class Events(EventStore):
    """Every event of every stream; the id of one is its place in the list."""

    def __init__(self):
        self.all = []

    async def store_event(self, stream_id, message):
        self.all.append((stream_id, message))
        return str(len(self.all) - 1)

    async def replay_events_after(self, last_event_id, send_callback):
        stream = self.all[int(last_event_id)][0]
        for place, (of, message) in enumerate(self.all):
            # A priming event has no message.
            if place > int(last_event_id) and of == stream and message is not None:
                await send_callback(EventMessage(message, str(place)))
        return stream


class Front:
    """Answers `busy` with 429 and tells what arrives; everything else goes to the SDK."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["method"] != "POST":
            resumes = any(name == b"last-event-id" for name, _ in scope["headers"])
            event("resume" if resumes else scope["method"].lower())
            return await self.app(scope, receive, send)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        sent = json.loads(body)
        if sent.get("method") == "subscriptions/listen":
            event("listen")
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
app = server.streamable_http_app(event_store=Events(), retry_interval=50)
uvicorn.Server(uvicorn.Config(Front(app), log_level="warning")).run(sockets=[listener])
