declare module 'node:events' {
  export function setMaxListeners(most: number, ...targets: EventTarget[]): void;
}
