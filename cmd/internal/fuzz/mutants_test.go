package fuzz_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// mutant is the system without one guard: some texts in its files are replaced.
type mutant struct {
	without string // the guard
	edits   []edit
	finds   string // a regular expression of the fuzzer's output: the check that must notice
}

type edit struct{ file, old, new string }

// root is the path of the repository's root.
const root = "../../.."

// mutants returns the mutants that the fuzzer must find. TestSoakTheFuzzerFindsEveryMutant runs it with each of them.
func mutants() []mutant {
	return append(append(mutantsOfWrites(), mutantsOfReads()...), mutantsOfTenants()...)
}

func one(without, finds, file, old, new string) mutant {
	return mutant{without, []edit{{file, old, new}}, finds}
}

// Parts of answers in which the fuzzer notices several mutants.
const (
	otherStatus = `want \d+ `
	otherValue  = `\(-want \+got\)`
	inRace      = `a race of tenant`
)

const withoutAttributes = `tenant_id, child_id, object_id, parent_id, slug, path, author_id, body, author_state, moderation_state, ` +
	`version, created_at, updated_at`

func mutantsOfWrites() []mutant {
	return []mutant{
		one("the comparison of a replayed key's request", otherStatus, "store/create.go", `case !slices.Equal(r.RequestHash, c.hash):`,
			`case len(c.hash) == 0:`),
		one("the release of a refused create's key", `want 201|500`, "store/create.go",
			`	if err := k.releaseKeys(ctx, tx, tenant, todo, release); err != nil {
		return err
	}
`, ``),
		one("the order of creates for one place in a batch", `an operation.*already-written|want 409`, "store/store.go",
			`r = max(r, wanted[place])`, `_ = wanted`),
		one("If-Match of an edit", otherStatus, "store/edit.go", `(h.if_version = 0 OR c.version = h.if_version)
   AND c.author_state = 'ACTIVE' AND c.moderation_state NOT IN`, `h.if_version >= -1
   AND c.author_state = 'ACTIVE' AND c.moderation_state NOT IN`),
		one("If-Match of the removal of an edge", otherStatus+"|"+otherValue, "store/edges.go",
			`AND h.version IN (0, e.version)`, `AND h.version >= -1`),
		one("the lock of edges that a put depends on", inRace, "store/edges.go", ` ORDER BY e.from_id, e.to_id
   FOR NO KEY UPDATE OF e`+"`"+`

// insertEdgesSQL`, ` ORDER BY e.from_id, e.to_id`+"`"+`

// insertEdgesSQL`),
		one("the order of a batch's operations on one entity", `operation \d+ of`, "api/batch.go", `wave = max(wave, l.wave+1)`,
			`wave = max(wave, l.wave)`),
		one("the ETag of the new version", `ETag`, "api/children.go", `ETag: etag(out[0].Child.Version), WriteToken`,
			`ETag: etag(max(1, out[0].Child.Version-1)), WriteToken`),
		one("the event of a removal", otherValue+`|has \d+ versions and \d+ events|cannot follow|answered`, "store/edges.go",
			`		tx.events = append(tx.events, event.Event{`, `		if eventType == event.Removed && r.Version > 3 {
			continue
		}
		tx.events = append(tx.events, event.Event{`),
		one("one version per change", otherValue+`|cannot follow`, "store/edges.go", `SET status = 'REMOVED', version = e.version + 1`,
			`SET status = 'REMOVED', version = e.version + 1 + (e.version > 4)::int`),
		one("the lock of a thread", otherStatus, "store/create.go", `case r.Locked:`, `case r.Locked && r.Ord > 1:`),
		one("premoderation", otherValue, "store/create.go", `if r.Premoderated {`, `if r.Premoderated && c.in.ReplyTo == "" {`),
		one("the direction of a removal of edges", otherValue+`|has \d+ versions`, "store/removals.go",
			`return d == DirectionBoth || string(d) == string(end)`, `return string(d) != "from" || end == kinds.From`),
		one("attributes on the way back from the archive", otherValue, "store/returning.go",
			`INTO {{.Table}} (`+"`"+` + movedColumns + `+"`"+`) SELECT `+"`"+` + movedColumns + `+"`"+` FROM gone`,
			`INTO {{.Table}} (`+withoutAttributes+`) SELECT `+withoutAttributes+` FROM gone`),
	}
}

func mutantsOfReads() []mutant {
	return []mutant{
		one("the archive in the truth's reads", otherStatus, "store/children.go",
			`return "(SELECT * FROM " + s.Table() + " UNION ALL SELECT * FROM " + s.Archive() + ")"`,
			`return "(SELECT * FROM " + s.Table() + ")"`),
		one("a page's beginning behind its cursor", otherValue+`|want one`, "projections/threadcache/read.go",
			`(created_at, child_id) > (@created_at::timestamptz, @child_id::uuid)
 ORDER BY created_at, child_id
 LIMIT @limit`+"`"+`

// newestSQL`, `(created_at, child_id) >= (@created_at::timestamptz, @child_id::uuid)
 ORDER BY created_at, child_id
 LIMIT @limit`+"`"+`

// newestSQL`),
		one("the tie-breaker of a list's cursor", otherValue, "projections/followercounts/read.go",
			`(positioned_at, to_id) < (@positioned_at, @after)`, `positioned_at < @positioned_at AND @after::bigint IS NOT NULL`),
		one("the tie-breaker of a list's order", otherValue, "projections/followercounts/read.go",
			`ORDER BY page.positioned_at DESC, page.id DESC`, `ORDER BY page.positioned_at DESC, page.id`),
		one("the place of a page behind so many", otherValue, "projections/threadcache/read.go",
			`AND (created_at, child_id) < ((SELECT next_at FROM bucket_at), (SELECT next_id FROM bucket_at))
 ORDER BY created_at DESC, child_id DESC
 LIMIT (SELECT @limit::bigint) OFFSET (SELECT @skip - before FROM bucket_at)`,
			`AND (created_at, child_id) < ((SELECT next_at FROM bucket_at), (SELECT next_id FROM bucket_at))
 ORDER BY created_at DESC, child_id DESC
 LIMIT (SELECT @limit::bigint) OFFSET (SELECT @skip - before + (@skip > 20)::int FROM bucket_at)`),
		one("the wait for a Tidings-Token", otherValue, "api/fresh.go", `} else if !reached {`, `} else if !reached && len(refs) > 3 {`),
		one("the decrement of a count", otherValue, "projections/followercounts/followercounts.go", `			d = -1
		}
		move(object{k.tenant, k.to}, d, 0)`, `			d = -1
			move(object{k.tenant, k.to}, 1, 0)
		}
		move(object{k.tenant, k.to}, d, 0)`),
		one("an aggregate's old value under an edit", otherValue, "projections/threadcache/aggregates.go", `s.Sum + sign*v}`,
			`s.Sum + max(0, sign)*v}`),
		one("the end of a kept page when an event changes it", otherValue, "api/pages.go", `			l.need[e.Stream] = e.Seq
			p.drop(l)`, `			l.need[e.Stream] = e.Seq`),
		one("the tombstone of what a moderator hid", otherValue, "event/types.go",
			`return Visible(authorState, moderationState) || authorState == AuthorActive && moderationState == ModerationPending`,
			`return Visible(authorState, moderationState) || authorState == AuthorActive`),
		one("what readers may not see of a gone child's history", otherValue, "api/childlists.go", `|| gone && !moderator {`,
			`|| gone && !moderator && i == 0 {`),
	}
}

func mutantsOfTenants() []mutant {
	return []mutant{
		{"the tenant in a query, and row security of its table", []edit{
			{"projections/threadcache/read.go", `SELECT /* threadcache.oldest */ ` + "`" + ` + fields + ` + "`" + `
  FROM child_lists
 WHERE tenant_id = current_setting('tidings.tenant')::bigint AND kind = @kind`,
				`SELECT /* threadcache.oldest */ ` + "`" + ` + fields + ` + "`" + `
  FROM child_lists
 WHERE kind = @kind`},
			{"migrations/projections/00001_init.sql", `'child_aggregates', 'child_settings']) t;`,
				`'child_aggregates', 'child_settings']) t;
ALTER TABLE child_lists DISABLE ROW LEVEL SECURITY;`},
		}, `another tenant's text`},
		one("the tenant of a cursor", otherStatus, "api/cursor.go", `l.tenant, l.name, l.of)`, `0*l.tenant, l.name, l.of)`),
		one("the list of a cursor", otherStatus, "api/cursor.go", `l.tenant, l.name, l.of)`, `l.tenant, "list", l.of)`),
		one("the tenant of a Tidings-Token", otherStatus, "api/fresh.go", `return list{tenant: tenant, name: "write token"}`,
			`return list{tenant: 0 * tenant, name: "write token"}`),
		one("the role of a writer", otherStatus, "api/server.go", `	if p.Has(op.role) {
		return nil
	}`, `	if p.Has(op.role) || op.role == tokens.RoleWrite {
		return nil
	}`),
	}
}

// mutate writes the changed files into dir, and returns them by the paths that they replace.
func (m mutant) mutate(t *testing.T, dir string) map[string]string {
	t.Helper()
	files := map[string]string{}
	for _, e := range m.edits {
		name, err := filepath.Abs(filepath.Join(root, e.file))
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(text), e.old); n != 1 {
			t.Fatalf("without %s: %s has the text %d times, want once: %s", m.without, e.file, n, e.old)
		}
		files[name] = filepath.Join(dir, strings.ReplaceAll(e.file, "/", "_"))
		if err := os.WriteFile(files[name], []byte(strings.Replace(string(text), e.old, e.new, 1)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// TestEveryMutantIsOfTheSystemAsItIs keeps the list in step with the code. The soak runs the mutants.
func TestEveryMutantIsOfTheSystemAsItIs(t *testing.T) {
	for _, m := range mutants() {
		m.mutate(t, t.TempDir())
	}
}
