export type { Bootstrap } from './bootstrap.js';
export { PermanentError, SubscribeError, type SubscribeErrorCode } from './errors.js';
export type * from './event.js';
export { handle, Health, type HandleOptions, type Handler, type Log } from './handle.js';
