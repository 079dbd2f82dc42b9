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
 * `freeze`, `thaw`, `kill` and `restart` are faults of all of it, including its NATS server. A restart leaves the addresses as they are.
 */
export async function startDev() {
  const dir = await mkdtemp(join(tmpdir(), 'tidings-dev-'));
  await chmod(dir, 0o755); // under root, PostgreSQL runs as another user, who must read the directory
  const dev = { dir };
  let ports = { API_ADDR: '127.0.0.1:0', OPS_ADDR: '127.0.0.1:0' };
  let child, ended;
  const end = async (signal) => {
    child.kill(signal);
    await ended;
  };
  Object.assign(dev, {
    freeze: () => child.kill('SIGSTOP'),
    thaw: () => child.kill('SIGCONT'),
    kill: () => end('SIGKILL'),
    restart: async () => {
      [child, ended] = await start(dir, ports);
      Object.assign(dev, JSON.parse(await readFile(join(dir, 'dev.json'), 'utf8')));
    },
    stop: async () => {
      await end('SIGINT');
      await rm(dir, { recursive: true });
    },
  });
  try {
    await dev.restart();
  } catch (error) {
    await rm(dir, { recursive: true });
    throw error;
  }
  ports = { API_ADDR: new URL(dev.api).host, OPS_ADDR: new URL(dev.ops).host };
  return dev;
}

async function start(dir, ports) {
  const { DATABASE_URL, PROJECTIONS_DATABASE_URL, NATS_URL, ...inherited } = process.env; // dev starts its own servers
  const child = spawn(tidings, ['dev', '--data', dir], { env: { ...inherited, ...ports }, stdio: ['ignore', 'pipe', 'pipe'] });
  let output = '';
  const ended = new Promise((resolve) => child.once('close', resolve));
  const ready = new Promise((resolve) => {
    for (const stream of [child.stdout, child.stderr]) {
      stream.on('data', (text) => {
        output += text;
        if (output.includes('Ctrl-C stops everything')) resolve(true);
      });
    }
  });
  if ((await Promise.race([ready, ended])) !== true) throw new Error(`tidings dev ended while it started:\n${output}`);
  return [child, ended];
}
