// A legacy MCP server on the official TypeScript SDK, version 1, for the tests. Its streams can be resumed.
//
// Prints one JSON line per event on stdout: first `{"event":"listening","url":…}`, later `cancelled`,
// `busy`, `get`, `resume` (a GET with `Last-Event-ID`) and `delete`. The tool `busy` never reaches the SDK:
// its HTTP exchange is answered 429 with `Retry-After: 7`, as a rate limiter in front of a server does.

import { randomUUID } from 'node:crypto';
import { createServer } from 'node:http';

import { McpServer } from '@modelcontextprotocol/sdk/server/mcp.js';
import { StreamableHTTPServerTransport } from '@modelcontextprotocol/sdk/server/streamableHttp.js';
import { z } from 'zod';

const event = (name, fields = {}) => console.log(JSON.stringify({ event: name, ...fields }));
const text = (words) => ({ content: [{ type: 'text', text: words }] });

// The tool's own work, ended early by its cancellation.
const work = (ms, signal) =>
    new Promise((done) => {
        const timer = setTimeout(done, ms);
        signal.addEventListener('abort', () => (clearTimeout(timer), done()));
    });

// Every event of every stream; the id of one is its place in the list.
class Events {
    all = [];
    async storeEvent(stream, message) {
        return String(this.all.push({ stream, message }) - 1);
    }
    async replayEventsAfter(last, { send }) {
        const { stream } = this.all[Number(last)];
        for (const [id, one] of this.all.entries()) {
            // A priming event has no message.
            if (id > Number(last) && one.stream === stream && one.message.jsonrpc) await send(String(id), one.message);
        }
        return stream;
    }
}

function build() {
    const server = new McpServer({ name: 'typescript-server-v1', version: '1.0' }, { capabilities: { tools: { listChanged: true } } });
    const progress = async ({ _meta, sendNotification }, value, total) => {
        if (_meta?.progressToken === undefined) return;
        await sendNotification({ method: 'notifications/progress', params: { progressToken: _meta.progressToken, progress: value, total } });
    };
    const sum = { description: 'Adds two numbers.', inputSchema: { a: z.number(), b: z.number() }, annotations: { readOnlyHint: true } };
    server.registerTool('add', sum, ({ a, b }) => text(String(a + b)));
    server.registerTool('count', { inputSchema: { steps: z.number() } }, async ({ steps }, extra) => {
        for (let step = 1; step <= steps; step++) {
            await progress(extra, step, steps);
            await work(20, extra.signal);
        }
        return text('counted');
    });
    server.registerTool('wait', {}, async (extra) => {
        extra.signal.addEventListener('abort', () => event('cancelled'));
        await progress(extra, 1, 2);
        await work(120_000, extra.signal);
        return text('never');
    });
    server.registerTool('busy', {}, () => text('not busy'));
    server.registerTool('announce', {}, () => (server.sendToolListChanged(), text('announced')));
    server.registerTool('ask', { description: "Asks the client's user for a name, then its model for a greeting." }, async ({ sendRequest }) => {
        const requestedSchema = { type: 'object', properties: { name: { type: 'string' } }, required: ['name'] };
        const elicit = { method: 'elicitation/create', params: { message: 'Who is there?', requestedSchema } };
        const { name } = (await sendRequest(elicit, z.any())).content;
        const messages = [{ role: 'user', content: { type: 'text', text: `Greet ${name}.` } }];
        const sample = { method: 'sampling/createMessage', params: { messages, maxTokens: 20 } };
        return text(`${name}: ${(await sendRequest(sample, z.any())).content.text}`);
    });
    server.registerTool('resume', { description: 'Ends its own stream before it answers.' }, ({ closeSSEStream }) => (closeSSEStream(), text('resumed')));
    return server;
}

const sessions = new Map();

async function serve(request, response) {
    let body;
    if (request.method === 'POST') {
        let bytes = '';
        for await (const piece of request) bytes += piece;
        body = JSON.parse(bytes);
    } else {
        event('last-event-id' in request.headers ? 'resume' : request.method.toLowerCase());
    }
    if (body?.method === 'tools/call' && body.params.name === 'busy') {
        event('busy');
        response.writeHead(429, { 'Retry-After': '7', 'Content-Type': 'text/plain' });
        return response.end('slow down');
    }
    let transport = sessions.get(request.headers['mcp-session-id']);
    if (!transport) {
        transport = new StreamableHTTPServerTransport({
            sessionIdGenerator: () => randomUUID(),
            onsessioninitialized: (id) => sessions.set(id, transport),
            onsessionclosed: (id) => sessions.delete(id),
            eventStore: new Events(),
            retryInterval: 50,
        });
        await build().connect(transport);
    }
    await transport.handleRequest(request, response, body);
}

const server = createServer((request, response) => serve(request, response).catch((error) => (console.error(error), response.destroy())));
server.listen(0, '127.0.0.1', () => event('listening', { url: `http://127.0.0.1:${server.address().port}/mcp` }));
