// Runs the official conformance suite: conformance.mjs ARGUMENTS.
//
// The suite imports a function that Node has from version 22 on and that none of its server scenarios calls: where it
// is not there, a stand-in is imported.

import * as fs from 'node:fs';
import { register } from 'node:module';

if (!fs.globSync) {
    const standIn = `data:text/javascript,${encodeURIComponent("export * from 'node:fs'; export const globSync = undefined;")}`;
    const hooks = `export const resolve = (name, { parentURL, ...rest }, next) =>
        name === 'fs' && parentURL?.includes('/@modelcontextprotocol/conformance/')
            ? { url: ${JSON.stringify(standIn)}, shortCircuit: true }
            : next(name, { parentURL, ...rest });`;
    register(`data:text/javascript,${encodeURIComponent(hooks)}`);
}
await import('@modelcontextprotocol/conformance/dist/index.js');
