package versioned

import "slices"

// For the tests, which stand outside: the test servers are migrated, and migrations know kinds, which are versioned objects.

// CursorSQL is the statement that reads where retention has come.
const CursorSQL = cursorSQL

// Statements are all of the table's.
func (t *Table[T]) Statements() []string {
	return slices.Concat(t.statements(), []string{cursorSQL, nowSQL, moveSQL, restSQL})
}

// HeadsAfterSQL is the statement of retention's walk.
func (t *Table[T]) HeadsAfterSQL() string { return t.headsAfterSQL }

// SelectByFirstIndexSQL is Query's statement by the columns of the table's first index.
func (t *Table[T]) SelectByFirstIndexSQL(paged bool) string {
	return t.selectSQL(t.def.Indexes[0], Latest, paged)
}

// At has retention call at before each of its steps.
func (r Retention[T]) At(at func(step string)) Retention[T] {
	r.at = at
	return r
}
