import type { codes } from './generated/codes.js';
import type { Problem } from './generated/index.js';

export type ProblemCode = (typeof codes)[number];

/**
 * An answer outside 2xx; 304 is one. Branch on `code`. `problem` is the whole answer (RFC 9457). If the answer does not
 * come from the API, for example from a proxy, `code` is empty.
 */
export class ProblemError extends Error {
  override readonly name = 'ProblemError';
  readonly status: number;
  readonly code: ProblemCode | '';
  readonly problem: Problem;
  readonly headers: Headers;

  constructor(response: Response, problem: Problem, request?: Request) {
    const fields = (problem.errors ?? []).map((e) => `; ${e.pointer ?? e.parameter ?? e.header ?? ''} ${e.detail ?? ''}`).join('');
    const where = request === undefined ? '' : `${request.method} ${new URL(request.url).pathname}: `;
    super(`${where}${problem.status} ${problem.code || problem.title}${problem.detail ? `: ${problem.detail}` : ''}${fields}`);
    this.status = problem.status;
    this.code = problem.code as ProblemCode | '';
    this.problem = problem;
    this.headers = response.headers;
  }

  /** The `X-Request-Id` of the answer, for the operator of the API. */
  get requestId(): string | null {
    return this.headers.get('X-Request-Id');
  }
}

/** Reports whether an error is a problem with one of the codes, or with any code if none is given. */
export function isProblem(error: unknown, ...wanted: ProblemCode[]): error is ProblemError {
  return error instanceof ProblemError && (wanted.length === 0 || (wanted as string[]).includes(error.code));
}

/** The problem in an answer's body, or one made from the status if the body is not a problem. */
export function problemOf(response: Response, body: unknown): Problem {
  const title = response.statusText || `status ${response.status}`;
  const made: Problem = { type: 'about:blank', status: response.status, title, code: '' };
  return typeof body === 'object' && body !== null && 'code' in body ? (body as Problem) : made;
}

/** Like `problemOf`, from the text of the body. */
export function parseProblem(response: Response, text: string): Problem {
  try {
    return problemOf(response, JSON.parse(text));
  } catch {
    return problemOf(response, text);
  }
}
