/** The members of a list's request that concern pages. */
interface ListRequest {
  query?: { cursor?: string; skip?: number; around?: string };
}

/** A page of a list. */
interface ListPage {
  items: readonly unknown[] | null;
  next?: string;
}

type ItemOf<P extends ListPage> = P['items'] extends readonly (infer I)[] | null ? I : never;

/**
 * The pages of a list. To resume later, keep a page's `next` and send it as `query.cursor`.
 *
 *     for await (const page of pages((r) => tidings.listUserFollowers(r), { path: { user_id: '42' } })) save(page.items, page.next);
 */
export async function* pages<const R extends object, P extends ListPage>(
  list: (request: R) => Promise<P>,
  request: R & ListRequest,
): AsyncGenerator<P, void, undefined> {
  for (let asked: R & ListRequest = request; ; ) {
    const page = await list(asked);
    yield page;
    if (page.next === undefined) return;
    const { skip, around, ...query } = request.query ?? {}; // the first page's position; a cursor excludes them
    asked = { ...request, query: { ...query, cursor: page.next } };
  }
}

/** The items of a list, page after page. */
export async function* each<const R extends object, P extends ListPage>(
  list: (request: R) => Promise<P>,
  request: R & ListRequest,
): AsyncGenerator<ItemOf<P>, void, undefined> {
  for await (const page of pages(list, request)) yield* (page.items ?? []) as ItemOf<P>[];
}
