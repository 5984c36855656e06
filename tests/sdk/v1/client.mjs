// Drives an MCP endpoint with the official TypeScript SDK, version 1: client.mjs URL legacy [--busy-fails].
//
// Prints one JSON line per scenario; the exit code is 1 if one failed. `--busy-fails` expects what the
// SDK does without a sidecar: a 429 is an exception, not a tool result.

import assert from 'node:assert/strict';

import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';
import {
    CreateMessageRequestSchema,
    ElicitRequestSchema,
    ToolListChangedNotificationSchema,
} from '@modelcontextprotocol/sdk/types.js';

const [url, , ...flags] = process.argv.slice(2);
const busyFails = flags.includes('--busy-fails');
let failed = 0;

const say = (scenario, ok, detail) => console.log(JSON.stringify({ scenario, ok, detail }));

// Runs one scenario under a bound and prints what came of it.
async function scenario(name, run) {
    let timer;
    const bound = new Promise((_, reject) => (timer = setTimeout(() => reject(new Error('20 s are over')), 20_000)));
    try {
        say(name, true, await Promise.race([run(), bound]));
    } catch (error) {
        failed++;
        say(name, false, error.stack);
    } finally {
        clearTimeout(timer);
    }
}

const client = new Client({ name: 'typescript-client-v1', version: '1.0' }, { capabilities: { elicitation: {}, sampling: {} } });
const transport = new StreamableHTTPClientTransport(new URL(url));
let heard = () => {};
const changed = new Promise((done) => (heard = done));
client.setNotificationHandler(ToolListChangedNotificationSchema, () => heard());
client.setRequestHandler(ElicitRequestSchema, () => ({ action: 'accept', content: { name: 'Ada' } }));
client.setRequestHandler(CreateMessageRequestSchema, () => ({ role: 'assistant', content: { type: 'text', text: 'Good day' }, model: 'none' }));
await client.connect(transport);

const call = (name, args = {}, options = {}) => client.callTool({ name, arguments: args }, undefined, options);

async function says(words, name, args) {
    assert.equal((await call(name, args)).content[0].text, words);
    return words;
}
const add = () => says('42', 'add', { a: 2, b: 40 });

let names;
await scenario('list', async () => {
    names = (await client.listTools()).tools.map((tool) => tool.name);
    for (const name of ['add', 'count', 'wait', 'busy', 'announce', 'ask']) assert.ok(names.includes(name), `${name} in ${names}`);
    return names;
});
await scenario('call', add);
await scenario('progress', async () => {
    const seen = [];
    const result = await call('count', { steps: 5 }, { onprogress: ({ progress }) => seen.push(progress) });
    assert.equal(result.content[0].text, 'counted');
    assert.ok(seen.length >= 3, `${seen}`);
    assert.ok(seen.every((value, at) => at === 0 || value > seen[at - 1]), `${seen}`);
    return seen;
});
await scenario('cancel', async () => {
    const stop = new AbortController();
    const onprogress = () => stop.abort('enough');
    await assert.rejects(call('wait', {}, { signal: stop.signal, onprogress }));
    return add();
});
await scenario('busy', async () => {
    if (busyFails) {
        await assert.rejects(call('busy'));
        return 'an exception';
    }
    const result = await call('busy');
    assert.equal(result.isError, true);
    assert.equal(result._meta['oz0/retryable'], true);
    assert.equal(result._meta['oz0/retry_after'], 7);
    await add();
    return result.content[0].text;
});
await scenario('notifications', async () => {
    // What is announced before the stream stands is lost, so announce until it is heard.
    let done = false;
    changed.then(() => (done = true));
    while (!done) {
        await call('announce');
        await Promise.race([changed, new Promise((again) => setTimeout(again, 500))]);
    }
    return 'heard';
});
await scenario('ask', () => says('Ada: Good day', 'ask'));
if (names.includes('resume')) await scenario('resume', () => says('resumed', 'resume'));
await scenario('call again', add);
await scenario('close', async () => {
    await transport.terminateSession();
    await client.close();
});
process.exit(failed ? 1 : 0);
