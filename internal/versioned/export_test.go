package versioned

import "slices"

// Exports for the tests, which are an external package: the test servers are migrated, and package
// migrations imports package kinds, whose definitions are versioned objects.

// CursorSQL is the statement that reads retention's cursor.
const CursorSQL = cursorSQL

// Statements returns all statements of the table.
func (t *Table[T]) Statements() []string {
	return slices.Concat(t.statements(), []string{cursorSQL, nowSQL, moveSQL, restSQL})
}

// HeadsAfterSQL returns the statement with which retention reads the next heads.
func (t *Table[T]) HeadsAfterSQL() string { return t.headsAfterSQL }

// SelectByFirstIndexSQL returns Query's statement for the table's first index.
func (t *Table[T]) SelectByFirstIndexSQL(paged bool) string {
	return t.selectSQL(t.def.Indexes[0], Latest, paged)
}

// At makes retention call at before each of its steps.
func (r Retention[T]) At(at func(step string)) Retention[T] {
	r.at = at
	return r
}
