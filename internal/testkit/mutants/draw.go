package mutants

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Rooms are the folders whose code Draw changes: those that carry, store and read events. A pattern
// of filepath.Match.
var Rooms = []string{"relay", "consumers", "outbox", "store", "internal/lease", "internal/work", "projections/*", "ops/erasure",
	"ops/erase", "outbox/coldstore", "internal/versioned", "internal/postgres", "internal/broker", "api", "subscribe", "migrations/*"}

// Drawn is an edit by chance, at one place of a file.
type Drawn struct {
	Kind          string // operator, condition, call, or sql
	File          string // relative to the root, with slashes
	Line          int
	Before, After string

	offset int
}

// String is one line. It is unique among the edits of one tree.
func (d Drawn) String() string {
	short := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	return fmt.Sprintf("%s:%d  %s  ->  %s", d.File, d.Line, short(d.Before), short(d.After))
}

// Folder is the Go package's folder: that of the file, or for a migration, the one that embeds it.
func (d Drawn) Folder() string {
	dir := filepath.ToSlash(filepath.Dir(d.File))
	if strings.HasSuffix(d.File, ".sql") {
		dir = filepath.ToSlash(filepath.Dir(dir))
	}
	return dir
}

// Edit returns the edit with as much text around it as makes it the only one in its file, as
// Overlay needs it.
func (d Drawn) Edit(root string) (Edit, error) {
	data, err := os.ReadFile(filepath.Join(root, d.File))
	if err != nil {
		return Edit{}, err
	}
	text, from, to := string(data), d.offset, d.offset+len(d.Before)
	if to > len(text) || text[from:to] != d.Before {
		return Edit{}, fmt.Errorf("%s has changed: draw again", d.File)
	}
	for strings.Count(text, text[from:to]) != 1 {
		from, to = max(0, from-1), min(len(text), to+1)
	}
	return Edit{d.File, text[from:to], text[from:d.offset] + d.After + text[d.offset+len(d.Before):to]}, nil
}

// Draw returns the edits that are possible below root in an order that depends on the seed and the
// tree alone. The folders take turns, and so do the kinds within a folder: the first n are spread
// over both. Some do not compile.
func Draw(root string, seed uint64) ([]Drawn, error) {
	r := rand.New(rand.NewPCG(seed, 0))
	var turns [][]Drawn
	for _, room := range Rooms {
		dirs, err := filepath.Glob(filepath.Join(root, room))
		if err != nil {
			return nil, err
		}
		for _, dir := range dirs {
			all, err := possible(root, dir)
			if err != nil {
				return nil, err
			}
			kinds := map[string][]Drawn{}
			for _, i := range r.Perm(len(all)) {
				kinds[all[i].Kind] = append(kinds[all[i].Kind], all[i])
			}
			first := len(turns) // folders begin with different kinds
			turns = append(turns, inTurn(kinds["operator"], kinds["sql"], kinds["condition"], kinds["sql"], kinds["call"])(first))
		}
	}
	return inTurn(turns...)(0), nil
}

// inTurn takes one of each list after another, from the list first on, and each edit once.
func inTurn(lists ...[]Drawn) func(first int) []Drawn {
	return func(first int) (all []Drawn) {
		seen := map[string]bool{}
		for more := true; more; {
			more = false
			for i := range lists {
				l := &lists[(first+i)%len(lists)]
				for len(*l) > 0 && seen[(*l)[0].key()] {
					*l = (*l)[1:]
				}
				if len(*l) > 0 {
					all, more = append(all, (*l)[0]), true
					seen[(*l)[0].key()] = true
				}
			}
		}
		return all
	}
}

func (d Drawn) key() string { return fmt.Sprint(d.File, d.offset, d.Kind, d.After) }

// possible returns the edits of a folder's own files, without those of its subfolders.
func possible(root, dir string) (all []Drawn, err error) {
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		return nil, err
	}
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		name := filepath.Join(dir, f.Name())
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return nil, err
		}
		text, err := os.ReadFile(name)
		switch ext := filepath.Ext(name); {
		case f.IsDir() || strings.HasSuffix(name, "_test.go") || f.Name() == "metrics.go":
			continue
		case err != nil:
			return nil, err
		case ext == ".sql":
			up, _, _ := strings.Cut(string(text), "-- +goose Down")
			all = append(all, locate(rel, string(text), sqlEdits(up, 0))...)
		case ext == ".go":
			edits, err := goEdits(string(text))
			if err != nil {
				return nil, fmt.Errorf("%s: %w", rel, err)
			}
			all = append(all, locate(rel, string(text), edits)...)
		}
	}
	return all, nil
}

func locate(file, text string, edits []Drawn) []Drawn {
	for i := range edits {
		edits[i].File = filepath.ToSlash(file)
		edits[i].Line = 1 + strings.Count(text[:edits[i].offset], "\n")
	}
	return edits
}

var swaps = map[token.Token]token.Token{token.LSS: token.LEQ, token.LEQ: token.LSS, token.GTR: token.GEQ, token.GEQ: token.GTR,
	token.EQL: token.NEQ, token.NEQ: token.EQL, token.LAND: token.LOR, token.LOR: token.LAND, token.ADD: token.SUB, token.SUB: token.ADD}

// Lines that only tell of what has happened are left alone, and so are plain checks of an error:
// they would need a failure at each step.
var (
	tells      = regexp.MustCompile(`\b(log|metrics|slog)\.|Errorf|errors\.New|\.Inc\(|\.Observe\(|panic\(`)
	plainError = regexp.MustCompile(`^(err|\w+Err) [!=]= nil$`)
	isSQL      = regexp.MustCompile(`\b(SELECT|UPDATE|INSERT|DELETE|WHERE|AND)\b`)
)

// goEdits returns the possible edits of a Go file, of its code and of the SQL in its strings.
func goEdits(text string) (all []Drawn, err error) {
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, "", text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	at := func(p token.Pos) int { return set.Position(p).Offset }
	add := func(kind string, from, to int, after string) {
		line := text[strings.LastIndexByte(text[:from], '\n')+1:]
		line, _, _ = strings.Cut(line, "\n")
		if !tells.MatchString(line) {
			all = append(all, Drawn{Kind: kind, Before: text[from:to], After: after, offset: from})
		}
	}
	source := func(n ast.Node) string { return text[at(n.Pos()):at(n.End())] }
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BinaryExpr:
			to, ok := swaps[n.Op]
			if ok && !plainError.MatchString(source(n)) && !strings.ContainsAny(source(n), "\"`") {
				from, end := at(n.Pos()), at(n.End())
				add("operator", from, end, text[from:at(n.OpPos)]+to.String()+text[at(n.OpPos)+len(n.Op.String()):end])
			}
		case *ast.IfStmt:
			cond := source(n.Cond)
			switch {
			case n.Init != nil && n.Else == nil && plainError.MatchString(cond):
				add("call", at(n.Pos()), at(n.End()), "")
			case !plainError.MatchString(cond):
				add("condition", at(n.Cond.Pos()), at(n.Cond.End()), "!("+cond+")")
				if n.Else == nil && leaves(n.Body) {
					add("condition", at(n.Cond.Pos()), at(n.Cond.End()), "false && ("+cond+")")
				}
			}
		case *ast.BasicLit:
			if n.Kind == token.STRING && isSQL.MatchString(n.Value) {
				all = append(all, sqlEdits(n.Value[1:len(n.Value)-1], at(n.Pos())+1)...)
			}
		}
		return true
	})
	return all, nil
}

// leaves reports whether the block ends with a return, a break or a continue.
func leaves(b *ast.BlockStmt) bool {
	if len(b.List) == 0 {
		return false
	}
	switch b.List[len(b.List)-1].(type) {
	case *ast.ReturnStmt, *ast.BranchStmt:
		return true
	}
	return false
}

// sqlToken matches what sqlEdits must step over as one, then words, then single characters.
var sqlToken = regexp.MustCompile(`(?s)--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|"[^"]*"|` + sqlLock + `|@?\w+|\S`)

const sqlLock = `FOR (?:NO KEY UPDATE|KEY SHARE|UPDATE|SHARE)(?: OF \w+(?:, \w+)*)?(?: SKIP LOCKED| NOWAIT)?`

// sqlEnds are the words that end a condition.
var sqlEnds = []string{"AND", "OR", "GROUP", "ORDER", "LIMIT", "RETURNING", "UNION", "EXCEPT", "INTERSECT", "WHEN", "THEN", "ELSE",
	"WINDOW", "HAVING", "LOOP", "DO", "JOIN", "LEFT", "CROSS", "WHERE", "SET", "FROM", "EXECUTE", "OFFSET", "SELECT", "WITH", ",", ";"}

// sqlEdits returns the possible edits of SQL: a condition after WHERE or AND that is always true,
// and a lock left out. The condition's text stays, because its parameters must.
func sqlEdits(text string, offset int) (all []Drawn) {
	tokens := sqlToken.FindAllStringIndex(text, -1)
	word := func(i int) string { return text[tokens[i][0]:tokens[i][1]] }
	for i := range tokens {
		switch w := word(i); {
		case strings.HasPrefix(w, "FOR "):
			all = append(all, Drawn{Kind: "sql", Before: w, offset: offset + tokens[i][0]})
		case w == "WHERE" || w == "AND" && !between(word, i):
			end := conditionEnd(tokens, word, i+1)
			if end <= i+1 || strings.Contains("<>=+-|(*/,.", word(end-1)) || slices.Contains(sqlEnds, word(end-1)) {
				continue // the rest is in another string
			}
			from, to := tokens[i+1][0], tokens[end-1][1]
			all = append(all, Drawn{Kind: "sql", Before: text[from:to], After: "(" + text[from:to] + " OR true)", offset: offset + from})
		}
	}
	return all
}

// conditionEnd returns the token after the condition that begins at token i.
func conditionEnd(tokens [][]int, word func(int) string, i int) int {
	depth, ranges := 0, 0
	for ; i < len(tokens); i++ {
		switch w := word(i); {
		case w == "(" || w == "[" || w == "CASE":
			depth++
		case w == ")" || w == "]" || w == "END":
			if depth--; depth < 0 {
				return i
			}
		case depth > 0:
		case w == "BETWEEN":
			ranges++
		case w == "AND" && ranges > 0:
			ranges--
		case slices.Contains(sqlEnds, w) || strings.HasPrefix(w, "FOR ") || strings.HasPrefix(w, "--"):
			return i
		}
	}
	return i
}

// between reports whether the AND at token i is that of a BETWEEN.
func between(word func(int) string, i int) bool {
	depth := 0
	for i--; i >= 0; i-- {
		switch w := word(i); {
		case w == ")" || w == "]":
			depth++
		case w == "(" || w == "[":
			if depth--; depth < 0 {
				return false
			}
		case depth > 0:
		case w == "BETWEEN":
			return true
		case w == "AND" || w == "WHERE" || w == "OR" || w == ";":
			return false
		}
	}
	return false
}
