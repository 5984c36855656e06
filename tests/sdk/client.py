"""Drives an MCP endpoint with the official Python SDK: client.py URL legacy|modern [--busy-fails].

Prints one JSON line per scenario; the exit code is 1 if one failed. `--busy-fails` expects what the
SDK does without a sidecar: a 429 is an exception, not a tool result.
"""

import json
import sys
import traceback

import anyio
from mcp import Client
from mcp.types import CreateMessageResult, ElicitResult, TextContent, ToolListChangedNotification

URL, ERA = sys.argv[1:3]
BUSY_FAILS = "--busy-fails" in sys.argv
failed = []


async def scenario(name, run):
    """Runs one scenario under a bound and prints what came of it."""
    try:
        with anyio.fail_after(20):
            detail = await run()
        print(json.dumps({"scenario": name, "ok": True, "detail": detail}), flush=True)
    except Exception:
        failed.append(name)
        print(json.dumps({"scenario": name, "ok": False, "detail": traceback.format_exc()}), flush=True)


async def elicited(context, params):
    return ElicitResult(action="accept", content={"name": "Ada"})


async def sampled(context, params):
    return CreateMessageResult(role="assistant", content=TextContent(text="Good day"), model="none")


async def main():
    changed = anyio.Event()

    async def heard(message):
        if isinstance(message, ToolListChangedNotification):
            changed.set()

    mode = "legacy" if ERA == "legacy" else "2026-07-28"
    callbacks = {"message_handler": heard, "elicitation_callback": elicited, "sampling_callback": sampled}
    async with Client(URL, mode=mode, **callbacks) as client:

        offered = set()

        async def add():
            result = await client.call_tool("add", {"a": 2, "b": 40})
            assert result.content[0].text == "42", result
            return "42"

        async def tools():
            names = {tool.name for tool in (await client.list_tools()).tools}
            assert {"add", "count", "wait", "busy", "announce", "ask"} <= names, names
            offered.update(names)
            return sorted(names)

        async def progress():
            seen = []

            async def report(value, total, message):
                seen.append(value)

            result = await client.call_tool("count", {"steps": 5}, progress_callback=report)
            assert result.content[0].text == "counted", result
            assert len(seen) >= 3 and seen == sorted(set(seen)) and seen[-1] <= 5, seen
            return seen

        async def cancel():
            async with anyio.create_task_group() as group:

                async def begun(value, total, message):
                    group.cancel_scope.cancel()

                await client.call_tool("wait", {}, progress_callback=begun)
            assert group.cancel_scope.cancelled_caught
            return await add()

        async def busy():
            try:
                result = await client.call_tool("busy", {})
            except Exception as error:
                assert BUSY_FAILS, error
                return repr(error)
            assert not BUSY_FAILS and result.is_error, result
            assert result.meta["oz0/retryable"] is True and result.meta["oz0/retry_after"] == 7, result
            await add()
            return result.content[0].text

        async def until(event):
            # What is announced before the stream stands is lost, so announce until it is heard.
            while not event.is_set():
                await client.call_tool("announce", {})
                with anyio.move_on_after(0.5):
                    await event.wait()

        async def notifications():
            if ERA == "legacy":
                await until(changed)
                return "heard on the GET stream"
            async with client.listen(tools_list_changed=True) as stream:
                await client.call_tool("announce", {})
                event = await anext(stream)
            return type(event).__name__

        async def ask():
            result = await client.call_tool("ask", {})
            assert result.content[0].text == "Ada: Good day", result
            return result.content[0].text

        async def resume():
            result = await client.call_tool("resume", {})
            assert result.content[0].text == "resumed", result
            return result.content[0].text

        await scenario("list", tools)
        await scenario("call", add)
        await scenario("progress", progress)
        await scenario("cancel", cancel)
        await scenario("busy", busy)
        await scenario("notifications", notifications)
        await scenario("ask", ask)
        if ERA == "legacy" and "resume" in offered:
            await scenario("resume", resume)
        await scenario("call again", add)


anyio.run(main)
print(json.dumps({"scenario": "close", "ok": True}), flush=True)
sys.exit(1 if failed else 0)
