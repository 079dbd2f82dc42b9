package catalog

import (
	"cmp"
	"fmt"
	"github.com/tidings/tidings/kinds"
)

// Statement makes or drops tables of a kind. It runs as the owner of the tables or as
// tidings_system. A second run changes nothing.
type Statement struct {
	What string
	SQL  string
	Args []any
}

// MakeTables returns the statements that make the missing tables of every kind of the set in that
// database, with the constraints of their ids.
func (w Database) MakeTables(s *kinds.Set) []Statement {
	return append(w.makeTables(s), w.narrow(s)...)
}

func (w Database) makeTables(s *kinds.Set) (all []Statement) {
	for _, e := range s.AllEdges() {
		all = append(all, w.makeEdges(e)...)
	}
	for _, c := range s.AllChildren() {
		all = append(all, w.makeChildren(c)...)
	}
	return all
}

// StoredSQL returns the query of the file that is in force beside the built-in kinds. It runs as
// the owner of the tables, and has no row if no such file exists.
func (w Database) StoredSQL() string {
	return fmt.Sprintf(`SELECT object -> 'kinds' FROM %s WHERE tenant_id = %d AND name = '%s' AND version_state = 'LATEST'`, w.name,
		installation, objectName)
}

func truthEdges(e kinds.Edge) []Statement {
	all := []Statement{{"make the tables of the edges " + e.Name, `SELECT make_edge_kind($1, $2, $3, $4, $5, $6)`,
		[]any{e.Name, e.Plural, e.Ends[0], e.Ends[1], !e.NoSelf(), e.Partitions}}}
	if e.ToChild {
		all = append(all, Statement{"index the edges " + e.Name + " by target", `SELECT make_edges_to_children($1)`, []any{e.Name}})
	}
	return all
}

func truthChildren(c kinds.Child) []Statement {
	n := c.Names()
	return []Statement{{"make the tables of the children " + c.Name, `SELECT make_child_kind($1, $2, $3, $4, $5, $6, $7)`,
		[]any{c.Name, c.Plural, n.ID, n.Parent, c.Threaded, c.OnePerAuthor, c.Partitions}},
		{"let the API lock shelved children " + c.Name, `SELECT let_api_lock_shelf($1)`, []any{c.Name}}}
}

// truthNarrow gives the columns of ids in the tables of all kinds the constraints of their forms.
// Locks: the tables of kinds for which a form has changed, ACCESS EXCLUSIVE.
func truthNarrow(s *kinds.Set) (all []Statement) {
	narrow := func(kind string, first, second kinds.IDForm) {
		all = append(all, Statement{"narrow the ids of " + kind, `SELECT narrow_ids($1, $2, $3)`,
			[]any{kind, string(cmp.Or(first, kinds.String)), string(cmp.Or(second, kinds.String))}})
	}
	for _, e := range s.AllEdges() {
		narrow(e.Name, e.FromIDs, e.ToIDs)
	}
	for _, c := range s.AllChildren() {
		narrow(c.Name, c.ParentIDs, c.AuthorIDs)
	}
	return all
}

func noIDs(*kinds.Set) []Statement { return nil }

// truthDrop drops the tables of a kind, which must be empty.
// Locks: all of these tables and the tables that they are partitions of, ACCESS EXCLUSIVE.
func truthDrop(name, plural string) []Statement {
	return []Statement{{"drop the tables of the kind " + name, `SELECT drop_kind($1, $2)`, []any{name, plural}}}
}

func historyOfEdges(e kinds.Edge) []Statement { return history(e.Name, e.Ends[:], "text", false) }

func historyOfChildren(c kinds.Child) []Statement {
	return history(c.Name, []string{c.Names().ID}, "uuid", true)
}

func history(kind string, keys []string, of string, author bool) []Statement {
	return []Statement{{"make the tables of the history of " + kind, `SELECT make_history($1, $2, $3, $4)`, []any{kind, keys, of, author}}}
}

// historyDrop drops the tables of a kind's history, which must be empty. Locks: both of them,
// ACCESS EXCLUSIVE.
func historyDrop(name, _ string) []Statement {
	return []Statement{{"drop the tables of the history of " + name, `SELECT drop_history($1)`, []any{name}}}
}
