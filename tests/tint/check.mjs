// usage: node tests/tint/check.mjs DIR
//
// Compiles every DIR/*.wgsl with Tint, the WGSL compiler of Chromium, and makes the compute pipeline of its only entry
// point at WebGPU's default limits, so that too much workgroup memory or too many bindings are errors too. Dawn's null
// backend does that without a GPU. Prints every message with file and line; exits 1 if there was an error or no file.

import { existsSync, readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import process from 'node:process';
import { create, globals } from 'webgpu';

/** The device feature behind each WGSL extension that a module may enable. */
const FEATURES = {
  f16: 'shader-f16',
  subgroups: 'subgroups',
  chromium_experimental_subgroup_matrix: 'chromium-experimental-subgroup-matrix',
};

Object.assign(globalThis, globals);
const gpu = create(['backend=null', 'enable-dawn-features=allow_unsafe_apis']);
const devices = new Map();

/** A device with exactly these features and the default limits; made once for each set. */
async function deviceWith(features) {
  const key = features.join();
  if (!devices.has(key)) {
    const adapter = await gpu.requestAdapter();
    const lacking = features.filter((feature) => !adapter.features.has(feature));
    if (lacking.length > 0) throw new Error(`the adapter lacks ${lacking.join(', ')}`);
    devices.set(key, await adapter.requestDevice({ requiredFeatures: features }));
  }
  return devices.get(key);
}

/** The features that a module's `enable` directives ask for; Tint itself reports unknown names. */
function featuresOf(code) {
  const directives = code.matchAll(/^\s*enable\s+([^;]+);/gm);
  const names = [...directives].flatMap(([, list]) => list.split(',').map((name) => name.trim()));
  return [...new Set(names.map((name) => FEATURES[name]).filter(Boolean))].sort();
}

/** Prints the messages of one file; returns how many are errors. */
async function check(path) {
  const code = readFileSync(path, 'utf8');
  try {
    const device = await deviceWith(featuresOf(code));
    device.pushErrorScope('validation');
    const module = device.createShaderModule({ code });
    const { messages } = await module.getCompilationInfo();
    const invalid = await device.popErrorScope();
    for (const { type, message, lineNum, linePos } of messages) {
      console.log(`${path}:${lineNum}:${linePos}: ${type}: ${message}`);
    }
    const errors = messages.filter(({ type }) => type === 'error').length;
    if (errors > 0) return errors;
    if (invalid) throw invalid;
    await device.createComputePipelineAsync({ layout: 'auto', compute: { module } });
    return 0;
  } catch (error) {
    console.log(`${path}: error: ${error.message.trim()}`);
    return 1;
  }
}

const dir = process.argv[2];
if (dir === undefined || !existsSync(dir)) {
  console.error('usage: node tests/tint/check.mjs DIR');
  process.exit(2);
}
const files = readdirSync(dir).filter((name) => name.endsWith('.wgsl')).sort();
let errors = 0;
for (const name of files) errors += await check(join(dir, name));
console.log(`${files.length} modules, ${errors} errors`);
process.exitCode = errors > 0 || files.length === 0 ? 1 : 0;
