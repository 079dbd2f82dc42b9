package catalog_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/kinds/catalog"
)

const music = `
objects: {song: songs}
edges:
  play: {plural: plays, from: user, to: song, forward: plays, reverse: players,
    attributes: {mood: {enum: [calm, loud], filter: true}, times: {type: integer, default: 1}}}
  block: {plural: blocks, from: user, to: user, ends: [blocker_id, blocked_id], forward: blocked, reverse: blockers}
  like: {plural: likes, from: user, to: post, forward: likes, reverse: likers}
children:
  remark: {plural: remarks, parent: song, threaded: true, one_per_author: true,
    attributes: {stars: {type: integer, minimum: 1, maximum: 5, aggregate: true}}}
`

func TestMain(m *testing.M) { testkit.Main(m) }

// installation has separate databases for the truth and the projections, as in production.
type installation struct {
	catalog.Databases
	truth, projections *testkit.DB
}

func newInstallation(t *testing.T) installation {
	t.Helper()
	i := installation{truth: testkit.Postgres(t), projections: testkit.Postgres(t)}
	i.Databases = catalog.Databases{Truth: i.truth.Pool(t, postgres.RoleSystem), Projections: i.projections.Pool(t, postgres.RoleSystem)}
	return i
}

func (i installation) apply(t *testing.T, file string) catalog.Applied {
	t.Helper()
	done, err := catalog.Apply(t.Context(), i.Databases, catalog.Request{Kinds: testkit.Kinds(t, file), Actor: "ann", Reason: "why not"})
	if err != nil {
		t.Fatal(err)
	}
	return done
}

// inForce returns the kinds that a new process reads: with the API's role from the truth, with a
// consumer's from the projections.
func (i installation) inForce(t *testing.T) (truth, projections *kinds.Set) {
	t.Helper()
	sets := map[catalog.Database]*kinds.Set{}
	for where, pool := range map[catalog.Database]*pgxpool.Pool{catalog.Truth: i.truth.Pool(t, postgres.RoleAPI),
		catalog.Projections: i.Projections} {
		c := catalog.New(pool, where, testkit.Logger(t))
		if err := c.Load(t.Context()); err != nil {
			t.Fatal(err)
		}
		sets[where] = c.Now()
	}
	return sets[catalog.Truth], sets[catalog.Projections]
}

// holds verifies that both databases have the kinds of the file in force, and that the truth has
// their tables and no others.
func (i installation) holds(t *testing.T, file string) {
	t.Helper()
	want := testkit.Kinds(t, file)
	truth, projections := i.inForce(t)
	if d := kinds.Changes(truth, want); len(d) > 0 {
		t.Errorf("the truth differs: %+v", d)
	}
	if d := kinds.Changes(projections, want); len(d) > 0 {
		t.Errorf("the projections differ: %+v", d)
	}
	var tables []string
	for _, e := range want.AllEdges() {
		tables = append(tables, "edges_"+e.Name)
	}
	for _, c := range want.AllChildren() {
		tables = append(tables, "children_"+c.Name)
	}
	if d := cmp.Diff(tables, i.tables(t)); d != "" {
		t.Error(d)
	}
}

// tables returns the tables of the truth's kinds.
func (i installation) tables(t *testing.T) []string {
	t.Helper()
	rows, _ := i.Truth.Query(t.Context(), `SELECT inhrelid::regclass::text FROM pg_inherits
		WHERE inhparent IN ('edges'::regclass, 'children'::regclass) ORDER BY inhparent = 'children'::regclass, 1`)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func (i installation) exec(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

const (
	insertPlay   = `INSERT INTO plays (tenant_id, user_id, song_id, attributes) VALUES (1, 2, 3, '{"mood": "calm"}')`
	insertRemark = `INSERT INTO remarks (tenant_id, remark_id, song_id, slug, path, author_id, body)
		VALUES (1, gen_random_uuid(), 3, 'aaaaaaaa', '00000000000001aaaaaaaa', 2, 'x')`
)

func TestAppliedKindsAreInForceWithTheirTables(t *testing.T) {
	i := newInstallation(t)
	c := catalog.New(i.truth.Pool(t, postgres.RoleAPI), catalog.Truth, testkit.Logger(t))
	if err := c.Load(t.Context()); err != nil || c.Now() != kinds.Builtin() {
		t.Fatalf("before anything is applied: %v", err)
	}
	done := i.apply(t, music)
	if done.Version == 0 || len(done.Changes) != 4 {
		t.Errorf("%+v", done)
	}
	if changed, err := c.Refresh(t.Context()); !changed || err != nil {
		t.Errorf("refreshed: %v, %v", changed, err)
	}
	if _, ok := c.Now().Edge("play"); !ok {
		t.Error("the API does not know the kind")
	}
	if changed, err := c.Refresh(t.Context()); changed || err != nil {
		t.Errorf("refreshed again: %v, %v", changed, err)
	}
	i.holds(t, music)
	writer := i.truth.Pool(t, "tidings_writer")
	i.exec(t, writer, insertPlay)
	i.exec(t, writer, insertRemark)

	// The same file again changes nothing, even if the kinds have rows.
	if again := i.apply(t, music); again.Version != done.Version || len(again.Changes) != 0 {
		t.Errorf("again: %+v", again)
	}
	all, err := catalog.History(t.Context(), i.Truth)
	if err != nil || len(all) != 1 || all[0].By != "ann" || all[0].Reason != "why not" || all[0].Version != done.Version ||
		len(all[0].Changes) != 4 {
		t.Errorf("history: %+v, %v", all, err)
	}
}

func TestApplyInOneDatabase(t *testing.T) {
	db := testkit.Postgres(t)
	i := installation{truth: db, projections: db}
	i.Databases = catalog.Databases{Truth: db.Pool(t, postgres.RoleSystem), Projections: db.Pool(t, postgres.RoleSystem)}
	i.apply(t, music)
	i.holds(t, music)
	i.apply(t, `{}`)
	i.holds(t, `{}`)
}

func TestAnApplyThatBrokeOffIsCompletedByTheNext(t *testing.T) {
	other := strings.Replace(music, "to: song, forward: plays", "to: post, forward: plays", 1)
	for _, step := range catalog.Steps {
		for name, next := range map[string]string{"the same file": music, "another file, with another play": other, "no file": `{}`,
			"changed built-in kinds": changed} {
			if next != music && step != "truth commit" { // before that step it leaves nothing
				continue
			}
			t.Run(step+", then "+name, func(t *testing.T) {
				i := newInstallation(t)
				crash := errors.New("crash")
				_, err := catalog.ApplyInSteps(t.Context(), i.Databases, catalog.Request{Kinds: testkit.Kinds(t, music), Actor: "ann"},
					func(name string) error {
						if name == step {
							return crash
						}
						return nil
					})
				if !errors.Is(err, crash) {
					t.Fatal(err)
				}
				truth, projections := i.inForce(t)
				if d := kinds.Changes(kinds.Builtin(), truth); len(d) > 0 {
					t.Errorf("the truth has changed: %+v", d)
				}
				if _, ahead := projections.Edge("play"); ahead != (step == "truth object" || step == "truth commit") {
					t.Errorf("the projections know the kind: %v", ahead)
				}
				i.apply(t, next)
				i.holds(t, next)
			})
		}
	}
}

func TestTwoAppliesAtOnceAreOneAfterTheOther(t *testing.T) {
	i := newInstallation(t)
	two := strings.Replace(music, "  block:", "  ban:", 1)
	two = strings.Replace(two, "plural: blocks", "plural: bans", 1)
	var wg sync.WaitGroup
	r := catalog.Request{Kinds: testkit.Kinds(t, music), Actor: "ann"}
	_, err := catalog.ApplyInSteps(t.Context(), i.Databases, r, func(step string) error {
		if step != "projections" {
			return nil
		}
		wg.Go(func() { // while the first one runs
			done, err := catalog.Apply(context.WithoutCancel(t.Context()), i.Databases,
				catalog.Request{Kinds: testkit.Kinds(t, two), Actor: "bob"})
			var what []string
			for _, c := range done.Changes {
				what = append(what, c.Path+" "+c.What)
			}
			if d := cmp.Diff([]string{"edges.ban added", "edges.block removed"}, what); err != nil || d != "" {
				t.Errorf("the second call does not continue from the first: %v %s", err, d)
			}
		})
		testkit.Eventually(t, "the second waits", func() (waits bool, err error) {
			return waits, i.Truth.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database
				AND d.datname = current_database()
			  WHERE l.locktype = 'advisory' AND NOT l.granted)`).Scan(&waits)
		})
		return nil
	})
	wg.Wait()
	if err != nil {
		t.Fatal(err)
	}
	i.holds(t, two)
	if all, err := catalog.History(t.Context(), i.Truth); err != nil || len(all) != 2 || all[1].By != "bob" {
		t.Errorf("history: %+v, %v", all, err)
	}
}

func TestAnApplyWhoseConnectionIsCutKeepsNobodyWaiting(t *testing.T) {
	i := newInstallation(t)
	r := catalog.Request{Kinds: testkit.Kinds(t, music), Actor: "ann"}
	_, err := catalog.ApplyInSteps(t.Context(), i.Databases, r, func(step string) error {
		if step != "truth object" {
			return nil
		}
		_, err := i.truth.Pool(t, postgres.RoleOwner).Exec(t.Context(),
			`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'`)
		return err
	})
	if err == nil {
		t.Fatal("the connection was not cut")
	}
	i.apply(t, music)
	i.holds(t, music)
}

func TestADryRunChangesNothing(t *testing.T) {
	i := newInstallation(t)
	done, err := catalog.Apply(t.Context(), i.Databases, catalog.Request{Kinds: testkit.Kinds(t, music), Actor: "ann", DryRun: true})
	if err != nil || done.Version != 0 || len(done.Changes) != 4 {
		t.Errorf("%+v, %v", done, err)
	}
	i.holds(t, `{}`)
	if all, err := catalog.History(t.Context(), i.Truth); err != nil || len(all) != 0 {
		t.Errorf("history: %+v, %v", all, err)
	}
}

func TestAPluralThatATableHasIsAnErrorAndNothingChanges(t *testing.T) {
	i := newInstallation(t)
	file := strings.ReplaceAll(music, "plural: plays", "plural: leases")
	for _, dry := range []bool{true, false} {
		_, err := catalog.Apply(t.Context(), i.Databases, catalog.Request{Kinds: testkit.Kinds(t, file), Actor: "ann", DryRun: dry})
		if err == nil || !strings.Contains(err.Error(), "leases") {
			t.Errorf("dry run %v: %v", dry, err)
		}
	}
	i.holds(t, `{}`)
}

func TestKindsWithoutRowsMayChangeAsTheyLike(t *testing.T) {
	i := newInstallation(t)
	i.apply(t, music)
	for _, file := range []string{
		strings.Replace(music, "to: song, forward: plays", "to: post, forward: plays", 1),
		strings.Replace(music, "threaded: true, ", "partitions: 2, ", 1),
		strings.Replace(music, "plural: remarks", "plural: asides", 1),
		strings.Replace(music, "  remark:", "  note:", 1),
		`{}`,
	} {
		i.apply(t, file)
		i.holds(t, file)
	}
}

func TestChangesThatWouldReinterpretRowsAreRefused(t *testing.T) {
	i := newInstallation(t)
	i.apply(t, music)
	i.exec(t, i.Truth, insertPlay)
	i.exec(t, i.Truth, insertRemark)
	play, remark := "play has rows in edges", "remark has rows in children"
	another := "add a kind with another name, and write there"
	for _, c := range []struct {
		name, from, to string
		want           []string // for each refusal: path, change, rows, alternative
	}{
		{"ends", "from: user, to: song, forward", "from: user, to: song, ends: [fan_id, song_id], forward",
			[]string{"edges.play.ends", "[user_id song_id] → [fan_id song_id]", play, another}},
		{"to", "to: song, forward", "to: post, forward",
			[]string{"edges.play.ends", "[user_id song_id] → [user_id post_id]", play, another,
				"edges.play.to", "song → post", play, another}},
		{"parent", "parent: song", "parent: post", []string{"children.remark.parent", "song → post", remark, another}},
		{"plural", "plural: remarks", "plural: asides", []string{"children.remark.plural", "remarks → asides", remark, another}},
		{"threaded", "threaded: true, ", "", []string{"children.remark.threaded", "true → false", remark, another}},
		{"one per author", "one_per_author: true,", "", []string{"children.remark.one_per_author", "true → false", remark, another}},
		{"partitions", "threaded: true, ", "threaded: true, partitions: 2, ",
			[]string{"children.remark.partitions", "0 → 2", remark, another}},
		{"the kind", "  remark:", "  note:", []string{"children.remark", "removed", remark,
			"leave the kind in the file"}},
		{"a value in use", "enum: [calm, loud]", "enum: [quiet, loud]",
			[]string{"edges.play.attributes.mood.enum", "without calm", "play rows have the value calm",
				"change the rows with these values first, or keep the values"}},
		{"a required attribute", "attributes: {stars", "attributes: {verse: {type: integer, required: true}, stars",
			[]string{"children.remark.attributes.verse", "added, required", remark, "give it a default, or make it optional"}},
		{"a filter", "mood: {enum: [calm, loud], filter: true}", "key: {enum: [a], filter: true}, mood: {enum: [calm, loud]}",
			[]string{"edges.play.attributes.key", "added with filter", play,
				"add it without filter: a filtered list would not have the existing rows", "edges.play.attributes.mood.filter",
				"removed", play, "keep it"}},
		{"an aggregate", "aggregate: true", "aggregate: false",
			[]string{"children.remark.attributes.stars.aggregate", "removed", remark, "keep it"}},
		{"a narrower bound", "maximum: 5", "maximum: 4", []string{"children.remark.attributes.stars.maximum", "5 → 4: narrower", remark,
			"keep the wider bound"}},
		{"another type", "times: {type: integer, default: 1}", "times: {type: string}",
			[]string{"edges.play.attributes.times", "another type: integer → string", play, "add an attribute with another name"}},
		{"an attribute that goes", ", times: {type: integer, default: 1}", "",
			[]string{"edges.play.attributes.times", "removed", play, "keep it: writers may omit it"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := strings.Replace(music, c.from, c.to, 1)
			for _, dry := range []bool{true, false} {
				_, err := catalog.Apply(t.Context(), i.Databases, catalog.Request{Kinds: testkit.Kinds(t, file), Actor: "ann", DryRun: dry})
				var refused *catalog.RefusedError
				if !errors.As(err, &refused) {
					t.Fatal(err)
				}
				var got []string
				for _, r := range refused.Refused {
					got = append(got, r.Path, r.What, r.Rows, r.Instead)
				}
				if d := cmp.Diff(c.want, got); d != "" {
					t.Error(d)
				}
			}
		})
	}
	i.holds(t, music)

	// Changes that keep the meaning of rows are possible with rows too.
	wider := strings.NewReplacer("enum: [calm, loud]", "enum: [calm, wild]", "maximum: 5", "maximum: 10",
		"forward: plays", "forward: played",
		"attributes: {stars", "moderated: true, attributes: {verse: {type: integer}, stars", "default: 1}", "default: 2}").Replace(music)
	i.apply(t, wider)
	i.holds(t, wider)
	i.exec(t, i.Truth, insertPlay+` ON CONFLICT DO NOTHING`)
}

// narrow is music with ids of songs in a form.
func narrow(form string) string {
	return strings.Replace(music, "song: songs", "song: {plural: songs, id: "+form+"}", 1)
}

func TestTheTablesOfNarrowedIDsTakeNoOthers(t *testing.T) {
	i := newInstallation(t)
	writer := i.truth.Pool(t, "tidings_writer")
	ids := map[string][]string{"integer": {"3", "9223372036854775807"}, "uuid": {"0196b2d4-7c00-7000-8000-00000000000a"},
		"string": {"a|b", "9223372036854775808", "0196B2D4-7c00-7000-8000-00000000000a", "00", "7-", "0196b2d4-7c00-7000-8000"}}
	play := func(song string) error {
		_, err := writer.Exec(t.Context(), `INSERT INTO plays (tenant_id, user_id, song_id) VALUES (1, 2, $1)`, song)
		return err
	}
	remark := func(song string) error {
		_, err := writer.Exec(t.Context(), strings.Replace(insertRemark, "3", "$1", 1), song)
		return err
	}
	shelve := func(song string) error {
		_, err := i.Truth.Exec(t.Context(), `INSERT INTO children_archive_remark (tenant_id, child_id, object_id, author_id, body,
			author_state, moderation_state, version, created_at, updated_at)
			VALUES (1, gen_random_uuid(), $1, 2, 'x', 'ACTIVE', 'NONE', 1, now(), now())`, song)
		return err
	}
	// a table may be narrowed when it is made, later, and to another form
	for _, form := range []string{"integer", "uuid", "string", "uuid", "integer"} {
		i.apply(t, narrow(form))
		i.holds(t, narrow(form))
		for of, all := range ids {
			for _, id := range all {
				for table, insert := range map[string]func(string) error{"edges_play_to_": play, "children_remark_object_": remark,
					"children_archive_remark_object_": shelve} {
					err := insert(id)
					if fits := form == "string" || of == form; fits != (err == nil) ||
						!fits && (!postgres.IsCheck(err) || !strings.Contains(err.Error(), table+form)) {
						t.Errorf("%s in %s%s: %v", id, table, form, err)
					}
				}
			}
		}
		for _, table := range []string{"edges_play", "children_remark", "children_archive_remark"} {
			i.exec(t, i.Truth, `DELETE FROM `+table)
		}
		if again := i.apply(t, narrow(form)); len(again.Changes) != 0 {
			t.Errorf("again: %+v", again.Changes)
		}
	}
}

// The constraint of an author has the longest name. A partitioned table has it in its partitions.
func TestNarrowedIDsOfAuthorsAndOfPartitions(t *testing.T) {
	i := newInstallation(t)
	kind := "a" + strings.Repeat("b", 30)
	file := "objects: {disc: {plural: discs, id: integer}}\nedges:\n  spin: {plural: spins, from: disc, to: disc, ends: [a_id, b_id], " +
		"forward: spun, reverse: spinners, partitions: 3}\nchildren:\n  " + kind + ": {plural: notes, parent: disc, partitions: 2}\n"
	i.apply(t, file)
	i.exec(t, i.Truth, `SELECT narrow_ids('`+kind+`', 'integer', 'uuid')`)
	for table, values := range map[string]string{"edges_spin": `(tenant_id, from_id, to_id) VALUES (1, 7, 'x')`,
		"children_" + kind: `(tenant_id, child_id, object_id, author_id, body) VALUES (1, gen_random_uuid(), 7, 'x', 'x')`,
		"children_archive_" + kind: `(tenant_id, child_id, object_id, author_id, body, author_state, moderation_state, version, created_at,
			updated_at) VALUES (1, gen_random_uuid(), 7, 'x', 'x', 'ACTIVE', 'NONE', 1, now(), now())`} {
		if _, err := i.Truth.Exec(t.Context(), "INSERT INTO "+table+" "+values); !postgres.IsCheck(err) {
			t.Errorf("%s: %v", table, err)
		}
	}
	var changed bool
	if err := i.Truth.QueryRow(t.Context(), `SELECT narrow_ids($1, 'integer', 'uuid')`, kind).Scan(&changed); err != nil || changed {
		t.Errorf("the second time: %v, %v", changed, err)
	}
	if _, err := i.Truth.Exec(t.Context(), `SELECT narrow_ids($1, 'integer', 'UUID')`, kind); err == nil {
		t.Error("an unknown form is accepted")
	}
}

func TestIDsWithRowsAreNotNarrowed(t *testing.T) {
	i := newInstallation(t)
	i.apply(t, music)
	i.exec(t, i.Truth, insertPlay) // the song 3, which would fit
	i.exec(t, i.Truth, insertRemark)
	const instead = ". Instead, keep the form of the ids, or add an object with another name"
	refused := func(file, want string) {
		t.Helper()
		_, err := catalog.Apply(t.Context(), i.Databases, catalog.Request{Kinds: testkit.Kinds(t, file), Actor: "ann"})
		if err == nil || err.Error() != want {
			t.Errorf("%v\nwant %s", err, want)
		}
	}
	refused(narrow("integer"), "objects.song.id: string → integer in play: refused, because play has rows in edges"+instead+"\n"+
		"objects.song.id: string → integer in remark: refused, because remark has rows in children"+instead)
	i.holds(t, music)
	i.exec(t, i.Truth, `DELETE FROM edges_play`)
	i.exec(t, i.Truth, `DELETE FROM children_remark`)
	i.exec(t, i.Truth, `INSERT INTO threads (tenant_id, object, metadata) VALUES (1, '{"kind": "remark", "post_id": "x"}',
		'{"version_id": 7, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}')`)
	refused(narrow("integer"), "objects.song.id: string → integer in remark: refused, because remark has rows in threads"+instead)
	i.exec(t, i.truth.Pool(t, postgres.RoleOwner), `DELETE FROM threads`)
	i.apply(t, narrow("integer"))
	i.exec(t, i.Truth, insertPlay)
	refused(narrow("uuid"), "objects.song.id: integer → uuid in play: refused, because play has rows in edges"+instead)
	i.apply(t, narrow("string"))
	i.holds(t, music)
}

// A row that is written between the search for rows and the constraint is not lost.
func TestIDsThatAreWrittenInTheLastMomentAreNotNarrowed(t *testing.T) {
	i := newInstallation(t)
	i.apply(t, music)
	_, err := catalog.ApplyInSteps(t.Context(), i.Databases, catalog.Request{Kinds: testkit.Kinds(t, narrow("uuid")), Actor: "ann"},
		func(step string) error {
			if step == "truth tables" {
				i.exec(t, i.truth.Pool(t, "tidings_writer"), insertPlay)
			}
			return nil
		})
	if !postgres.IsCheck(err) || !strings.Contains(err.Error(), "narrow the ids of play") {
		t.Errorf("%v", err)
	}
	i.apply(t, music) // the projections know the new form, which has no effect there
	i.holds(t, music)
	i.exec(t, i.truth.Pool(t, "tidings_writer"), insertPlay+` ON CONFLICT DO NOTHING`)
}

// changed changes built-in kinds.
const changed = `
objects: {user: {id: uuid}}
edges: {follow: {partitions: 16}}
children:
  message: {attributes: {mood: {enum: [calm, loud]}}}
`

func TestBuiltInKindsChangeAsRowsAllow(t *testing.T) {
	i := newInstallation(t)
	done := i.apply(t, changed)
	i.holds(t, changed)
	var what []string
	for _, c := range done.Changes {
		what = append(what, c.Path+" "+c.What+" "+c.Kind)
	}
	if d := cmp.Diff([]string{"children.message.attributes.mood added ", "edges.follow.partitions 0 → 16 follow",
		"objects.user.id string → uuid in follow follow", "objects.user.id string → uuid in like like",
		"objects.user.id string → uuid in like_comment like_comment",
		"objects.user.id string → uuid in membership membership", "objects.user.id string → uuid in share share",
		"objects.user.id string → uuid in vote vote",
		"objects.user.id string → uuid in comment comment", "objects.user.id string → uuid in message message",
		"objects.user.id string → uuid in review review"}, what); d != "" {
		t.Error(d)
	}
	var parts int
	if err := i.Truth.QueryRow(t.Context(), `SELECT count(*) FROM pg_inherits WHERE inhparent = 'edges_follow'::regclass`).Scan(
		&parts); err != nil || parts != 16 {
		t.Errorf("%d partitions, %v", parts, err)
	}
	if again := i.apply(t, changed); again.Version != done.Version || len(again.Changes) != 0 {
		t.Errorf("again: %+v", again)
	}

	writer := i.truth.Pool(t, "tidings_writer")
	const numbers = `INSERT INTO follows (tenant_id, follower_id, followee_id) VALUES (1, '1', '2')`
	if _, err := writer.Exec(t.Context(), numbers); !postgres.IsCheck(err) {
		t.Errorf("a follow of numbers: %v", err)
	}
	i.exec(t, writer, `INSERT INTO follows (tenant_id, follower_id, followee_id)
		VALUES (1, '0196b2d4-7c00-7000-8000-00000000000a', '0196b2d4-7c00-7000-8000-00000000000b')`)
	i.exec(t, writer, `INSERT INTO messages (tenant_id, message_id, conversation_id, author_id, body)
		VALUES (1, gen_random_uuid(), 3, '0196b2d4-7c00-7000-8000-00000000000a', 'x')`)

	// Without a file they would be as they are built in, and the rows forbid that.
	_, err := catalog.Apply(t.Context(), i.Databases, catalog.Request{Kinds: kinds.Builtin(), Actor: "ann"})
	want := "children.message.attributes.mood: removed: refused, because message has rows in children. Instead, keep it: writers may " +
		"omit it\nedges.follow.partitions: 16 → 0: refused, because follow has rows in edges. Instead, add a kind with another name, " +
		"and write there"
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant %s", err, want)
	}
	i.holds(t, changed)
	wider := strings.Replace(changed, "user: {id: uuid}", "group: {id: integer}", 1) // nobody is in a group
	i.apply(t, wider)
	i.holds(t, wider)
	i.exec(t, writer, numbers)

	i.exec(t, i.Truth, `DELETE FROM edges_follow`)
	i.exec(t, i.Truth, `DELETE FROM children_message`)
	i.apply(t, `{}`)
	i.holds(t, `{}`)
	if all, err := catalog.History(t.Context(), i.Truth); err != nil || len(all) != 3 || len(all[2].Changes) != 3 {
		t.Errorf("history: %+v, %v", all, err)
	}
}

func TestEventsOfAKindKeepItToo(t *testing.T) {
	for name, sql := range map[string]string{
		"outbox_messages": `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
			VALUES (1, 'play', 2, 'created', '{}')`,
		"outbox_messages_dlq": `INSERT INTO outbox_messages_dlq (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version,
			payload, occurred_at, available_at, attempts,
		    event_id, inserted_at, slot) VALUES (1, 1, 'play', 2, 'created', 1, '{}', now(), now(), 11, gen_random_uuid(), now(), 0)`,
		"consumer_dead_letters": `INSERT INTO consumer_dead_letters (consumer_name, stream_seq, partition_key, tenant_id, aggregate_type,
			aggregate_id, event_id, event_type,
		    event_version, headers, payload, error) VALUES ('c', 1, 'p00', 1, 'play', 2, gen_random_uuid(), 'created', 1, '{}', '', 'x')`,
	} {
		t.Run(name, func(t *testing.T) {
			i := newInstallation(t)
			i.apply(t, music)
			pool := i.Truth
			if name == "consumer_dead_letters" {
				pool = i.Projections
			}
			i.exec(t, pool, sql)
			_, err := catalog.Apply(t.Context(), i.Databases, catalog.Request{Kinds: testkit.Kinds(t, `{}`), Actor: "ann"})
			if want := fmt.Sprintf("edges.play: removed: refused, because play has rows in %s. Instead, leave "+
				"the kind in the file", name); err == nil || err.Error() != want {
				t.Errorf("%v, want %s", err, want)
			}
			i.holds(t, music)
		})
	}
}

// A row that is written between the search for rows and the drop is not lost. The drop searches
// again, under a lock that writers wait for.
func TestAKindThatIsWrittenInTheLastMomentIsNotDropped(t *testing.T) {
	i := newInstallation(t)
	i.apply(t, music)
	r := catalog.Request{Kinds: testkit.Kinds(t, `{}`), Actor: "ann"}
	_, err := catalog.ApplyInSteps(t.Context(), i.Databases, r, func(step string) error {
		if step == "truth tables" {
			i.exec(t, i.truth.Pool(t, "tidings_writer"), insertPlay)
		}
		return nil
	})
	if err == nil || !strings.Contains(err.Error(), "edges_play has rows") {
		t.Errorf("%v", err)
	}
	i.holds(t, music)
}

func TestACatalogTakesKindsUpByItself(t *testing.T) {
	i := newInstallation(t)
	c := catalog.New(i.Projections, catalog.Projections, testkit.Logger(t))
	if err := c.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	i.apply(t, music)
	testkit.Eventually(t, "the kind", func() (bool, error) { _, ok := c.Now().Edge("play"); return ok, nil })
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestWhoAsksAfterAnApplySeesItHoweverManyAsk(t *testing.T) {
	i := newInstallation(t)
	c := catalog.New(i.truth.Pool(t, postgres.RoleAPI), catalog.Truth, testkit.Logger(t))
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				if _, err := c.Refresh(ctx); err != nil && ctx.Err() == nil {
					t.Error(err)
				}
			}
		})
	}
	for n := range 5 {
		file := fmt.Sprintf("edges: {play%d_x: {plural: plays, from: user, to: post, forward: plays, reverse: players}}", n)
		i.apply(t, file)
		if _, err := c.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, ok := c.Now().Edge(fmt.Sprintf("play%d_x", n)); !ok {
			t.Errorf("kind %d was applied, and does not exist", n)
		}
	}
	stop()
	wg.Wait()
	began := time.Now()
	for range 10 {
		if _, err := c.Refresh(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if took := time.Since(began); took < 400*time.Millisecond {
		t.Errorf("10 reads one after the other in %v: they are not spaced", took)
	}
}

func TestKindsThatDoNotGoWithTheReleaseAreAnError(t *testing.T) {
	i := newInstallation(t)
	i.exec(t, i.truth.Pool(t, postgres.RoleOwner), `INSERT INTO kinds (tenant_id, object, metadata)
		VALUES (0, '{"name": "installation", "kinds": {"edges": {"like": {"plural": "fans"}}}}',
	  '{"version_id": 7, "version_state": "LATEST", "created_by": "t", "last_update_time": "2026-01-02T03:04:05Z"}')`)
	c := catalog.New(i.Truth, catalog.Truth, testkit.Logger(t))
	if err := c.Load(t.Context()); err == nil || !strings.Contains(err.Error(), "version 7 are not valid in this release") {
		t.Errorf("%v", err)
	}
}

func TestAppliedIsJSON(t *testing.T) {
	got, err := json.Marshal(catalog.Applied{Changes: []kinds.Change{{Path: "edges.play", What: "added"}}, Version: 7})
	if want := `{"changes":[{"path":"edges.play","what":"added"}],"version":7}`; err != nil || string(got) != want {
		t.Errorf("%s, %v", got, err)
	}
}
