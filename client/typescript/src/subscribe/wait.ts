import { setMaxListeners } from 'node:events';
import { pause } from '../transport.js';

/** Waits, or returns early if the signal aborts. */
export function sleep(ms: number, signal: AbortSignal): Promise<void> {
  return pause(ms, signal).catch(() => {});
}

/** Resolves when the signal aborts. */
export function aborted(signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    if (signal.aborted) resolve();
    else signal.addEventListener('abort', () => resolve(), { once: true });
  });
}

/** A controller that aborts with the signal. */
export function linked(signal?: AbortSignal): AbortController {
  const controller = new AbortController();
  setMaxListeners(0, controller.signal); // Node warns of more than 10, and each event in hand may wait
  if (signal?.aborted) controller.abort(signal.reason);
  else signal?.addEventListener('abort', () => controller.abort(signal.reason), { once: true, signal: controller.signal });
  return controller;
}

/** Waits for a promise, or returns early if the signal aborts. */
export async function orAborted(promise: Promise<unknown>, signal: AbortSignal): Promise<void> {
  const early = linked(signal);
  await Promise.race([promise, aborted(early.signal)]).finally(() => early.abort());
}

/** A time by two clocks. The steady one stops while the machine sleeps, and the other jumps when it is set. */
export interface Moment {
  steady: number;
  wall: number;
}

export function moment(): Moment {
  return { steady: performance.now(), wall: Date.now() };
}

/** Reports whether less than ms have passed since a moment, by both clocks. */
export function isWithin(ms: number, since: Moment): boolean {
  const now = moment();
  return now.steady - since.steady < ms && now.wall - since.wall < ms;
}

/** The places of running calls. */
export class Slots {
  readonly #waiting = new Set<() => void>();

  constructor(private free: number) {}

  /** Takes a place. Returns false, without a place, if the signal aborts before. */
  async take(signal: AbortSignal): Promise<boolean> {
    while (this.free === 0 && !signal.aborted) {
      await new Promise<void>((resolve) => {
        const go = () => {
          this.#waiting.delete(go);
          signal.removeEventListener('abort', go);
          resolve();
        };
        this.#waiting.add(go);
        signal.addEventListener('abort', go);
      });
    }
    if (!signal.aborted) this.free--;
    else if (this.free > 0) this.#wake(); // the wake-up was perhaps for this one
    return !signal.aborted;
  }

  give(): void {
    this.free++;
    this.#wake();
  }

  #wake(): void {
    for (const go of this.#waiting) return go();
  }
}
