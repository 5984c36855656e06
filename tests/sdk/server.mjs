// An MCP server of both eras on the official TypeScript SDK, for the tests.
//
// Prints one JSON line per event on stdout: first `{"event":"listening","url":…}`, later `cancelled`,
// `busy`, `get`, `listen` and `delete`. The tool `busy` never reaches the SDK: its HTTP exchange is
// answered 429 with `Retry-After: 7`, as a rate limiter in front of a server does.

import { randomUUID } from 'node:crypto';
import { createServer } from 'node:http';

import { NodeStreamableHTTPServerTransport, toNodeHandler, toWebRequest } from '@modelcontextprotocol/node';
import { McpServer, createMcpHandler, inputRequired, isLegacyRequest } from '@modelcontextprotocol/server';
import { z } from 'zod';

const event = (name, fields = {}) => console.log(JSON.stringify({ event: name, ...fields }));
const text = (words) => ({ content: [{ type: 'text', text: words }] });

// The tool's own work, ended early by its cancellation.
const work = (ms, signal) =>
    new Promise((done) => {
        const timer = setTimeout(done, ms);
        signal.addEventListener('abort', () => (clearTimeout(timer), done()));
    });

function build(changed) {
    const server = new McpServer({ name: 'typescript-server', version: '1.0' }, { capabilities: { tools: { listChanged: true } } });
    const progress = async (mcp, value, total) => {
        const progressToken = mcp._meta?.progressToken;
        if (progressToken === undefined) return;
        await mcp.notify({ method: 'notifications/progress', params: { progressToken, progress: value, total } });
    };
    const sum = { description: 'Adds two numbers.', inputSchema: z.object({ a: z.number(), b: z.number() }), annotations: { readOnlyHint: true } };
    server.registerTool('add', sum, ({ a, b }) => text(String(a + b)));
    server.registerTool('count', { inputSchema: z.object({ steps: z.number() }) }, async ({ steps }, { mcpReq }) => {
        for (let step = 1; step <= steps; step++) {
            await progress(mcpReq, step, steps);
            await work(20, mcpReq.signal);
        }
        return text('counted');
    });
    server.registerTool('wait', { inputSchema: z.object({}) }, async (_, { mcpReq }) => {
        mcpReq.signal.addEventListener('abort', () => event('cancelled'));
        await progress(mcpReq, 1, 2);
        await work(120_000, mcpReq.signal);
        return text('never');
    });
    server.registerTool('busy', { inputSchema: z.object({}) }, () => text('not busy'));
    server.registerTool('announce', { inputSchema: z.object({}) }, () => (changed(server), text('announced')));
    // In modern the client sends the call again with each answer; in legacy the SDK asks on the call's stream.
    const greet = { description: "Asks the client's user for a name, then its model for a greeting.", inputSchema: z.object({}) };
    server.registerTool('ask', greet, (_, { mcpReq }) => {
        const name = mcpReq.requestState() ?? mcpReq.inputResponses?.person?.content.name;
        if (name === undefined) {
            const requestedSchema = { type: 'object', properties: { name: { type: 'string' } }, required: ['name'] };
            return inputRequired({ inputRequests: { person: inputRequired.elicit({ message: 'Who is there?', requestedSchema }) } });
        }
        const greeting = mcpReq.inputResponses.greeting;
        if (greeting === undefined) {
            const messages = [{ role: 'user', content: { type: 'text', text: `Greet ${name}.` } }];
            return inputRequired({ inputRequests: { greeting: inputRequired.createMessage({ messages, maxTokens: 20 }) }, requestState: name });
        }
        return text(`${name}: ${greeting.content.text}`);
    });
    return server;
}

const modern = createMcpHandler(() => build(() => modern.notify.toolsChanged()), { legacy: 'reject' });
const serveModern = toNodeHandler(modern);
const sessions = new Map();

async function serveLegacy(request, response, body) {
    let transport = sessions.get(request.headers['mcp-session-id']);
    if (!transport) {
        transport = new NodeStreamableHTTPServerTransport({
            sessionIdGenerator: () => randomUUID(),
            onsessioninitialized: (id) => sessions.set(id, transport),
            onsessionclosed: (id) => sessions.delete(id),
        });
        await build((server) => server.sendToolListChanged()).connect(transport);
    }
    await transport.handleRequest(request, response, body);
}

async function serve(request, response) {
    let body;
    if (request.method === 'POST') {
        let bytes = '';
        for await (const piece of request) bytes += piece;
        body = JSON.parse(bytes);
    } else {
        event(request.method.toLowerCase());
    }
    if (body?.method === 'subscriptions/listen') event('listen');
    if (body?.method === 'tools/call' && body.params.name === 'busy') {
        event('busy');
        response.writeHead(429, { 'Retry-After': '7', 'Content-Type': 'text/plain' });
        return response.end('slow down');
    }
    const legacy = await isLegacyRequest(await toWebRequest(request, body), body);
    await (legacy ? serveLegacy : serveModern)(request, response, body);
}

const server = createServer((request, response) => serve(request, response).catch((error) => (console.error(error), response.destroy())));
server.listen(0, '127.0.0.1', () => event('listening', { url: `http://127.0.0.1:${server.address().port}/mcp` }));
