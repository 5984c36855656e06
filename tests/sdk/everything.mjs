// The server that the official conformance suite describes, of both eras, on the official TypeScript SDK.
//
// Prints `{"event":"listening","url":…}` on stdout. Its legacy streams can be resumed.

import { randomUUID } from 'node:crypto';
import { createServer } from 'node:http';

import { NodeStreamableHTTPServerTransport, localhostHostValidation, localhostOriginValidation, toNodeHandler, toWebRequest } from '@modelcontextprotocol/node';
import {
    McpServer, ResourceTemplate, acceptedContent, completable, createMcpHandler,
    createRequestStateCodec, fromJsonSchema, inputRequired, isLegacyRequest,
} from '@modelcontextprotocol/server';
import { z } from 'zod';

const text = (words) => ({ content: [{ type: 'text', text: words }] });
const pause = (ms) => new Promise((done) => setTimeout(done, ms));
const pixel = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==';
const image = { type: 'image', data: pixel, mimeType: 'image/png' };
const silence = 'UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA=';
const state = createRequestStateCodec({ key: new Uint8Array(32).fill(7) });

const form = (properties) => ({ type: 'object', properties, required: Object.keys(properties) });
const asked = (message, properties) => inputRequired.elicit({ message, requestedSchema: form(properties) });
const sampled = (words, maxTokens) =>
    inputRequired.createMessage({ messages: [{ role: 'user', content: { type: 'text', text: words } }], maxTokens });

// What a tool is called with: nothing, or strings.
const strings = (...names) => z.object(Object.fromEntries(names.map((name) => [name, z.string()])));

const person = {
    $schema: 'https://json-schema.org/draft/2020-12/schema',
    type: 'object',
    $defs: { address: { $anchor: 'addressDef', type: 'object', properties: { street: { type: 'string' }, city: { type: 'string' } } } },
    properties: {
        name: { type: 'string' },
        address: { $ref: '#/$defs/address' },
        contactMethod: { type: 'string', enum: ['phone', 'email'] },
        phone: { type: 'string' },
        email: { type: 'string' },
    },
    allOf: [{ anyOf: [{ required: ['phone'] }, { required: ['email'] }] }],
    if: { properties: { contactMethod: { const: 'phone' } }, required: ['contactMethod'] },
    then: { required: ['phone'] },
    else: { required: ['email'] },
    additionalProperties: false,
};

function addTools(server) {
    const tool = (name, run, inputSchema = z.object({})) => server.registerTool(name, { description: name, inputSchema }, run);
    tool('test_simple_text', () => text('This is a simple text response for testing.'));
    tool('test_image_content', () => ({ content: [image] }));
    tool('test_audio_content', () => ({ content: [{ type: 'audio', data: silence, mimeType: 'audio/wav' }] }));
    const embedded = (uri, mimeType, words) => ({ type: 'resource', resource: { uri, mimeType, text: words } });
    const plain = embedded('test://embedded-resource', 'text/plain', 'This is an embedded resource content.');
    tool('test_embedded_resource', () => ({ content: [plain] }));
    const mixed = embedded('test://mixed-content-resource', 'application/json', '{"test":"data","value":123}');
    tool('test_multiple_content_types', () => ({ content: [{ type: 'text', text: 'Multiple content types test:' }, image, mixed] }));
    tool('test_error_handling', () => {
        throw new Error('This tool intentionally returns an error for testing');
    });
    const log = async (_, { mcpReq }) => {
        for (const words of ['Tool execution started', 'Tool processing data', 'Tool execution completed']) {
            await mcpReq.log('info', words);
            await pause(50);
        }
        return text('logged');
    };
    tool('test_tool_with_logging', log);
    tool('test_logging_tool', log);
    tool('test_tool_with_progress', async (_, { mcpReq }) => {
        const progressToken = mcpReq._meta?.progressToken;
        for (const progress of [0, 50, 100]) {
            const params = { progressToken, progress, total: 100 };
            if (progressToken !== undefined) await mcpReq.notify({ method: 'notifications/progress', params });
            await pause(50);
        }
        return text('done');
    });
    // Both ask on the call's own stream. What the SDK calls `elicitInput` and `requestSampling` asks on the GET stream,
    // where the request is lost if that stream does not stand yet.
    tool('test_sampling', async ({ prompt }, { mcpReq }) => {
        const messages = [{ role: 'user', content: { type: 'text', text: prompt } }];
        const { content } = await mcpReq.send({ method: 'sampling/createMessage', params: { messages, maxTokens: 100 } });
        return text(`LLM response: ${content.text}`);
    }, strings('prompt'));
    const elicit = (message, requestedSchema) => async (args, { mcpReq }) => {
        const params = { mode: 'form', message: args.message ?? message, requestedSchema };
        const { action, content } = await mcpReq.send({ method: 'elicitation/create', params });
        return text(`Elicitation completed: action=${action}, content=${JSON.stringify(content)}`);
    };
    const user = { username: { type: 'string', description: "User's response" }, email: { type: 'string', description: "User's email address" } };
    tool('test_elicitation', elicit('', form(user)), strings('message'));
    tool('test_elicitation_sep1034_defaults', elicit('Defaults', { type: 'object', properties: {
        name: { type: 'string', default: 'John Doe' },
        age: { type: 'integer', default: 30 },
        score: { type: 'number', default: 95.5 },
        status: { type: 'string', enum: ['active', 'inactive', 'pending'], default: 'active' },
        verified: { type: 'boolean', default: true },
    } }));
    const titled = (words) => words.map((title, at) => ({ const: `value${at + 1}`, title }));
    const options = ['option1', 'option2', 'option3'];
    tool('test_elicitation_sep1330_enums', elicit('Enums', { type: 'object', properties: {
        untitledSingle: { type: 'string', enum: options },
        titledSingle: { type: 'string', oneOf: titled(['First Option', 'Second Option', 'Third Option']) },
        legacyEnum: { type: 'string', enum: ['opt1', 'opt2', 'opt3'], enumNames: ['Option One', 'Option Two', 'Option Three'] },
        untitledMulti: { type: 'array', items: { type: 'string', enum: options } },
        titledMulti: { type: 'array', items: { anyOf: titled(['First Choice', 'Second Choice', 'Third Choice']) } },
    } }));
    server.registerTool('json_schema_2020_12_tool', { description: 'Tool with JSON Schema 2020-12 features', inputSchema: fromJsonSchema(person) }, () => text('fits'));
    const header = { type: 'object', properties: { region: { type: 'string', 'x-mcp-header': 'Region' } }, required: ['region'] };
    server.registerTool('test_custom_headers', { description: 'Has a mirrored parameter', inputSchema: fromJsonSchema(header) }, ({ region }) => text(region));
    tool('test_reconnection', async (_, { http }) => {
        http.closeSSE?.();
        await pause(100);
        return text('Reconnection test completed');
    });
    // A client that has not declared sampling may not be asked: the SDK refuses the call.
    tool('test_missing_capability', () => inputRequired({ inputRequests: { greeting: sampled('Generate a greeting', 50) } }));
    tool('test_streaming_elicitation', () => inputRequired({ inputRequests: { confirm: asked('Please confirm', { ok: { type: 'boolean' } }) } }));
    tool('test_trigger_tool_change', () => (modern.notify.toolsChanged(), text('changed')));
    tool('test_trigger_prompt_change', () => (modern.notify.promptsChanged(), text('changed')));
    addRounds(tool);
}

// Tools that ask the client for input by their result.
function addRounds(tool) {
    const rounds = (name, run) => tool(`test_input_required_result_${name}`, (_, { mcpReq }) => run(mcpReq.inputResponses ?? {}, mcpReq));
    const name = { name: { type: 'string' } };
    const ok = { ok: { type: 'boolean' } };
    rounds('elicitation', (answers) => {
        const given = acceptedContent(answers, 'user_name', z.object({ name: z.string() }));
        return given ? text(`Hello, ${given.name}!`) : inputRequired({ inputRequests: { user_name: asked('What is your name?', name) } });
    });
    rounds('sampling', ({ capital_question: answer }) =>
        answer ? text(answer.content.text) : inputRequired({ inputRequests: { capital_question: sampled('What is the capital of France?', 100) } }));
    rounds('list_roots', ({ client_roots: answer }) =>
        answer ? text(answer.roots.map(({ uri }) => uri).join()) : inputRequired({ inputRequests: { client_roots: inputRequired.listRoots() } }));
    const confirmed = async ({ confirm }, mcpReq) =>
        confirm && mcpReq.requestState() === 'confirm'
            ? text('state-ok')
            : inputRequired({ inputRequests: { confirm: asked('Please confirm', ok) }, requestState: await state.mint('confirm') });
    rounds('request_state', confirmed);
    rounds('tampered_state', confirmed);
    rounds('multiple_inputs', async ({ user_name, greeting, client_roots }) => {
        if (user_name && greeting && client_roots) return text(`${greeting.content.text} ${user_name.content.name}`);
        const inputRequests = { user_name: asked('What is your name?', name), greeting: sampled('Generate a greeting', 50), client_roots: inputRequired.listRoots() };
        return inputRequired({ inputRequests, requestState: await state.mint('multiple') });
    });
    rounds('multi_round', async (answers, mcpReq) => {
        if (mcpReq.requestState() === 'second') return text(`Your color is ${answers.step2?.content.color}`);
        if (mcpReq.requestState() === 'first') {
            const step2 = asked('Step 2: What is your favorite color?', { color: { type: 'string' } });
            return inputRequired({ inputRequests: { step2 }, requestState: await state.mint('second') });
        }
        return inputRequired({ inputRequests: { step1: asked('Step 1: What is your name?', name) }, requestState: await state.mint('first') });
    });
    rounds('capabilities', (_, { envelope }) => {
        const able = envelope?.['io.modelcontextprotocol/clientCapabilities'] ?? {};
        const inputRequests = {};
        if (able.elicitation) inputRequests.user_name = asked('What is your name?', name);
        if (able.sampling) inputRequests.greeting = sampled('Generate a greeting', 50);
        return Object.keys(inputRequests).length ? inputRequired({ inputRequests }) : text('nothing to ask');
    });
}

function addPrompts(server) {
    const says = (...content) => ({ messages: content.map((one) => ({ role: 'user', content: typeof one === 'string' ? { type: 'text', text: one } : one })) });
    const prompt = (name, run, argsSchema) => server.registerPrompt(name, { description: name, argsSchema }, run);
    prompt('test_simple_prompt', () => says('This is a simple prompt for testing.'));
    const words = z.object({ arg1: completable(z.string(), (begun) => ['paris', 'park', 'party'].filter((word) => word.startsWith(begun))), arg2: z.string() });
    prompt('test_prompt_with_arguments', ({ arg1, arg2 }) => says(`Prompt with arguments: arg1='${arg1}', arg2='${arg2}'`), words);
    prompt('test_prompt_with_embedded_resource', ({ resourceUri: uri }) => {
        const resource = { uri, mimeType: 'text/plain', text: 'Embedded resource content for testing.' };
        return says({ type: 'resource', resource }, 'Please process the embedded resource above.');
    }, strings('resourceUri'));
    prompt('test_prompt_with_image', () => says(image, 'Please analyze the image above.'));
    server.registerPrompt('test_input_required_result_prompt', { description: 'Asks first' }, ({ mcpReq }) => {
        const answer = mcpReq.inputResponses?.user_context;
        const question = asked('What context should the prompt use?', { context: { type: 'string' } });
        return answer ? says(answer.content.context) : inputRequired({ inputRequests: { user_context: question } });
    });
}

function addResources(server) {
    const resource = (uri, mimeType, content) =>
        server.registerResource(uri, uri, { description: uri, mimeType }, () => ({ contents: [{ uri, mimeType, ...content }] }));
    resource('test://static-text', 'text/plain', { text: 'This is the content of the static text resource.' });
    resource('test://static-binary', 'image/png', { blob: pixel });
    resource('test://watched-resource', 'text/plain', { text: 'Watch me.' });
    const template = new ResourceTemplate('test://template/{id}/data', { list: undefined });
    const config = { description: 'A template', mimeType: 'application/json' };
    server.registerResource('template', template, config, ({ href }, { id }) => ({
        contents: [{ uri: href, mimeType: 'application/json', text: JSON.stringify({ id, templateTest: true, data: `Data for ID: ${id}` }) }],
    }));
    server.server.setRequestHandler('resources/subscribe', () => ({}));
    server.server.setRequestHandler('resources/unsubscribe', () => ({}));
}

function build() {
    const listChanged = { listChanged: true };
    const capabilities = { completions: {}, logging: {}, prompts: listChanged, resources: { subscribe: true, ...listChanged }, tools: listChanged };
    const server = new McpServer({ name: 'everything', version: '1.0' }, { capabilities, requestState: { verify: state.verify } });
    addTools(server);
    addPrompts(server);
    addResources(server);
    return server;
}

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

const modern = createMcpHandler(build, { legacy: 'reject' });
const serveModern = toNodeHandler(modern);
const sessions = new Map();

async function serveLegacy(request, response, body) {
    const session = request.headers['mcp-session-id'];
    let transport = sessions.get(session);
    if (!transport) {
        if (session !== undefined) return response.writeHead(404).end();
        transport = new NodeStreamableHTTPServerTransport({
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

const [hostFits, originFits] = [localhostHostValidation(), localhostOriginValidation()];

async function serve(request, response) {
    if (!hostFits(request, response) || !originFits(request, response)) return;
    let body;
    if (request.method === 'POST') {
        let bytes = '';
        for await (const piece of request) bytes += piece;
        body = JSON.parse(bytes);
    }
    const legacy = await isLegacyRequest(await toWebRequest(request, body), body);
    await (legacy ? serveLegacy : serveModern)(request, response, body);
}

const server = createServer((request, response) => serve(request, response).catch((error) => (console.error(error), response.destroy())));
server.listen(0, '127.0.0.1', () => console.log(JSON.stringify({ event: 'listening', url: `http://127.0.0.1:${server.address().port}/mcp` })));
