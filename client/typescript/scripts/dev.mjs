// Starts `tidings dev` for a test or for the generator, in a data directory of its own.
import { spawn } from 'node:child_process';
import { chmod, mkdtemp, readFile, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';

/** The binary under test; `make tidings` builds it. */
export const tidings = process.env.TIDINGS_BIN ?? fileURLToPath(new URL('../../../bin/tidings', import.meta.url));

/**
 * Starts `tidings dev`. Returns its addresses (the members of its dev.json), its data directory, and `stop`, which also deletes the data.
 */
export async function startDev() {
  const dir = await mkdtemp(join(tmpdir(), 'tidings-dev-'));
  await chmod(dir, 0o755); // under root, PostgreSQL runs as another user, who must read the directory
  const { DATABASE_URL, PROJECTIONS_DATABASE_URL, NATS_URL, ...inherited } = process.env; // dev starts its own servers
  const dev = spawn(tidings, ['dev', '--data', dir], {
    env: { ...inherited, API_ADDR: '127.0.0.1:0', OPS_ADDR: '127.0.0.1:0' },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let output = '';
  const ended = new Promise((resolve) => dev.once('close', resolve));
  const stop = async () => {
    dev.kill('SIGINT');
    await ended;
    await rm(dir, { recursive: true });
  };
  const ready = new Promise((resolve) => {
    for (const stream of [dev.stdout, dev.stderr]) {
      stream.on('data', (text) => {
        output += text;
        if (output.includes('Ctrl-C stops everything')) resolve(true);
      });
    }
  });
  if ((await Promise.race([ready, ended])) !== true) {
    await rm(dir, { recursive: true });
    throw new Error(`tidings dev ended while it started:\n${output}`);
  }
  return { ...JSON.parse(await readFile(join(dir, 'dev.json'), 'utf8')), dir, stop };
}
