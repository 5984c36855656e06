"""Drives an MCP endpoint with the official Python SDK, version 1: client.py URL legacy [--busy-fails].

Prints one JSON line per scenario; the exit code is 1 if one failed. `--busy-fails` expects what the
SDK does without a sidecar: a 429 takes the whole connection with it, so the rest runs on a second one.
"""

import json
import sys
import traceback

import anyio
from mcp import ClientSession, types
from mcp.client.streamable_http import streamable_http_client

URL, ERA = sys.argv[1:3]
BUSY_FAILS = "--busy-fails" in sys.argv
failed = []


def say(name, ok, detail=None):
    print(json.dumps({"scenario": name, "ok": ok, "detail": detail}), flush=True)


async def scenario(name, run):
    """Runs one scenario under a bound and prints what came of it."""
    try:
        with anyio.fail_after(20):
            say(name, True, await run())
    except Exception:
        failed.append(name)
        say(name, False, traceback.format_exc())


async def elicited(context, params):
    return types.ElicitResult(action="accept", content={"name": "Ada"})


async def sampled(context, params):
    content = types.TextContent(type="text", text="Good day")
    return types.CreateMessageResult(role="assistant", content=content, model="none")


class Connection:
    """One session, and the scenarios that run on it."""

    resumes = False

    async def run(self, scenarios):
        self.changed = anyio.Event()
        async with streamable_http_client(URL) as (read, write, _):
            callbacks = {"elicitation_callback": elicited, "sampling_callback": sampled, "message_handler": self.heard}
            async with ClientSession(read, write, **callbacks) as self.session:
                await self.session.initialize()
                for name in scenarios:
                    if name == "resume" and not self.resumes:
                        continue
                    await scenario(name, getattr(self, name.replace(" ", "_")))

    async def heard(self, message):
        told = getattr(message, "root", None)
        if isinstance(told, types.ToolListChangedNotification):
            self.changed.set()

    async def call(self):
        result = await self.session.call_tool("add", {"a": 2, "b": 40})
        assert result.content[0].text == "42", result
        return "42"

    call_again = call

    async def list(self):
        names = {tool.name for tool in (await self.session.list_tools()).tools}
        assert {"add", "count", "wait", "busy", "announce", "ask"} <= names, names
        Connection.resumes = "resume" in names
        return sorted(names)

    async def progress(self):
        seen = []

        async def report(value, total, message):
            seen.append(value)

        result = await self.session.call_tool("count", {"steps": 5}, progress_callback=report)
        assert result.content[0].text == "counted", result
        assert len(seen) >= 3 and seen == sorted(set(seen)) and seen[-1] <= 5, seen
        return seen

    async def cancel(self):
        # A cancelled task tells the server nothing in this version, so the caller posts the notification himself.
        request = self.session._request_id
        told = anyio.Event()

        async def begun(value, total, message):
            if not told.is_set():
                told.set()
                params = types.CancelledNotificationParams(requestId=request, reason="enough")
                await self.session.send_notification(
                    types.ClientNotification(types.CancelledNotification(params=params))
                )

        async with anyio.create_task_group() as group:

            async def call():
                # The stream may end without an answer; this version waits on then.
                try:
                    await self.session.call_tool("wait", {}, progress_callback=begun)
                except Exception:
                    pass

            group.start_soon(call)
            await told.wait()
            detail = await self.call()
            group.cancel_scope.cancel()
        return detail

    async def busy(self):
        result = await self.session.call_tool("busy", {})
        assert result.isError, result
        assert result.meta["oz0/retryable"] is True and result.meta["oz0/retry_after"] == 7, result
        await self.call()
        return result.content[0].text

    async def notifications(self):
        # What is announced before the stream stands is lost, so announce until it is heard.
        while not self.changed.is_set():
            await self.session.call_tool("announce", {})
            with anyio.move_on_after(0.5):
                await self.changed.wait()
        return "heard on the GET stream"

    async def ask(self):
        result = await self.session.call_tool("ask", {})
        assert result.content[0].text == "Ada: Good day", result
        return result.content[0].text

    async def resume(self):
        result = await self.session.call_tool("resume", {})
        assert result.content[0].text == "resumed", result
        return result.content[0].text


async def busy_loses_the_connection():
    connection = Connection()
    try:
        with anyio.fail_after(20):
            async with streamable_http_client(URL) as (read, write, _):
                async with ClientSession(read, write) as connection.session:
                    await connection.session.initialize()
                    await connection.session.call_tool("busy", {})
        say("busy", False, "no exception")
    except BaseException as error:
        say("busy", "429" in "".join(traceback.format_exception(error)), repr(error))


async def main():
    before, after = ["list", "call", "progress", "cancel"], ["notifications", "ask", "resume", "call again"]
    if BUSY_FAILS:
        await Connection().run(before)
        await busy_loses_the_connection()
        await Connection().run(after)
    else:
        await Connection().run([*before, "busy", *after])
    say("close", True)


anyio.run(main)
sys.exit(1 if failed else 0)
