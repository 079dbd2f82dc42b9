export type { BatchOptions, Outcome } from './batch.js';
export { isProblem, ProblemError, type ProblemCode } from './errors.js';
export { codes } from './generated/codes.js';
export type * from './generated/types.gen.js';
export { each, pages } from './pages.js';
export { ifChanged, ifMatch, Session, Tidings, type BatchOperations, type TidingsOptions } from './tidings.js';
export { TimeoutError } from './transport.js';
