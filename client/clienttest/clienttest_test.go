package clienttest_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/client/clienttest"
	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/subscribe"
	"github.com/tidings/tidings/subscribe/projector"
)

func TestMain(m *testing.M) {
	flag.Parse()
	if testing.Short() {
		return // every test starts servers
	}
	goleak.VerifyTestMain(m)
}

func TestEachTestHasATenantOfItsOwn(t *testing.T) {
	start := time.Now()
	c := clienttest.New(t)
	first := time.Since(start)
	start = time.Now()
	other := clienttest.New(t)
	t.Logf("the first call took %s, the second %s", first.Round(time.Millisecond), time.Since(start).Round(time.Microsecond))
	s := c.Session()
	if _, err := s.Follows.Put(t.Context(), "7", "42"); err != nil {
		t.Fatal(err)
	}
	if counts, err := s.Users.Counts(t.Context(), "42"); err != nil || counts.Followers != 1 {
		t.Errorf("the writer's session: %+v, %v", counts, err)
	}
	if _, err := other.Follows.Get(t.Context(), "7", "42"); !client.IsNotFound(err) {
		t.Errorf("another tenant: %v", err)
	}
	tenant := clienttest.NewTenant(t)
	reader := tenant.Client(t, tenant.Token(t, "read"))
	if _, err := reader.Follows.Put(t.Context(), "7", "42"); !client.IsForbidden(err) {
		t.Errorf("a token without the role: %v", err)
	}
	if _, err := tenant.Client(t, "wrong").Kinds(t.Context()); !client.IsUnauthenticated(err) {
		t.Errorf("no token: %v", err)
	}
}

// docs/subscribe.md shows this test.
func TestAFollowReachesMySubscriber(t *testing.T) {
	tenant := clienttest.NewTenant(t)
	nc, err := nats.Connect(tenant.NATS)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	got, ended := make(chan event.Edge, 1), make(chan error, 1)
	go func() {
		ended <- subscribe.Handle(ctx, nc, "first", "follow.created", func(ctx context.Context, e subscribe.Event[event.Edge]) error {
			if e.TenantID == tenant.ID { // other tests write too
				got <- e.Data
			}
			return nil
		})
	}()
	c := tenant.Client(t, tenant.Token(t))
	if _, err := c.Follows.Put(ctx, "7", "42"); err != nil {
		t.Fatal(err)
	}
	select {
	case e := <-got:
		if e.From != "7" || e.To != "42" {
			t.Errorf("got %+v", e)
		}
	case err := <-ended:
		t.Fatal(err)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestAProjectionHasADatabaseOfItsOwn(t *testing.T) {
	tenant := clienttest.NewTenant(t)
	nc, err := nats.Connect(tenant.NATS)
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	url := clienttest.Database(t)
	if other := clienttest.Database(t); other == url {
		t.Errorf("two calls return %s", url)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if err := projector.Migrate(ctx, pool); err != nil {
		t.Fatal(err)
	}
	if _, err := tenant.Client(t, tenant.Token(t)).Follows.Put(ctx, "7", "42"); err != nil {
		t.Fatal(err)
	}
	if err := projector.Project(ctx, nc, pool, "first", func(_ context.Context, _ pgx.Tx, batch []event.Event) error {
		for i := range batch {
			if batch[i].TenantID == tenant.ID && batch[i].AggregateID == "42" {
				stop()
			}
		}
		return nil
	}); err != nil || t.Context().Err() != nil {
		t.Errorf("Project: %v", err)
	}
}

const blocks = `
objects: {user: users, place: places}
edges:
  block: {plural: blocks, from: user, to: user, ends: [blocker_id, blocked_id], forward: blocking, reverse: blockers}
  visit: {plural: visits, from: user, to: place, forward: visits, reverse: visitors,
    attributes: {how: {enum: [car, train], default: car, filter: true}}}
children:
  tip: {plural: tips, parent: place, threaded: true, moderated: true,
    attributes: {stars: {type: integer, minimum: 1, maximum: 5, aggregate: true}}}
`

// Kinds without types in the package are used by their names.
func TestAnyKindIsCalledByItsName(t *testing.T) {
	ctx := t.Context()
	clienttest.ApplyKinds(t, blocks)
	c := clienttest.New(t).Session()
	visits, tips := c.Edges("visit"), c.Children("tip")
	visit, err := visits.PutWith(ctx, "7", "5", map[string]any{"how": "train"})
	if err != nil || visit.From != "7" || visit.To != "5" || visit.Attributes["how"] != "train" || visit.Version != 1 {
		t.Fatalf("%+v, %v", visit, err)
	}
	if visit, err = visits.Patch(ctx, visit, map[string]any{"how": "car"}); err != nil || visit.Version != 2 ||
		visit.Attributes["how"] != "car" {
		t.Errorf("%+v, %v", visit, err)
	}
	_, err = visits.Patch(ctx, client.Edge{From: "7", To: "5", EdgeState: client.EdgeState{Version: 1}}, map[string]any{"how": "car"})
	var p *client.Problem
	var edge client.Edge
	var own struct {
		Visitor client.ID `json:"user_id"` // the kind's own name
	}
	if !errors.As(err, &p) || !client.IsStale(err) || p.CurrentAs(&edge) != nil || edge.From != "7" || edge.To != "5" ||
		edge.Version != 2 ||
		p.CurrentAs(&own) != nil || own.Visitor != "7" {
		t.Errorf("a stale version: %v, %+v, %+v of %s", err, edge, own, p.Current)
	}
	for list, l := range map[string]*client.List[client.Entry]{"visitors": visits.Reverse("5", client.Filter("how", "car")),
		"visits": visits.Forward("7")} {
		page, err := l.First(ctx)
		if want := map[string]client.ID{"visitors": "7", "visits": "5"}[list]; err != nil || len(page.Items) != 1 ||
			page.Items[0].Object != want || page.Items[0].Attributes["how"] != "car" {
			t.Errorf("%s: %+v, %v", list, page, err)
		}
	}
	if r, err := visits.Check(ctx, []client.Pair{{From: "7", To: "5"}, {From: "8", To: "5"}}); err != nil || len(r) != 2 || !r[0].Active ||
		r[1].Active || r[1].From != "8" {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := c.Edges("block").Put(ctx, "7", "8"); err != nil {
		t.Error(err)
	}
	if r, err := c.Edges("block").Check(ctx, []client.Pair{{From: "8", To: "7"}}); err != nil ||
		len(r) != 1 || r[0].Active || !r[0].Reversed {
		t.Errorf("%+v, %v", r, err)
	}
	ops := []client.Operation[client.Edge]{visits.PutWithOp("9", "5", map[string]any{"how": "train"}),
		visits.RemoveOp("9", "5"), visits.PutOp("", "5")}
	var statuses []int
	for o, err := range visits.Batch(ctx, slices.Values(ops)) {
		if err != nil {
			t.Fatal(err)
		}
		if o.Status == 201 && (o.Entity == nil || o.Entity.From != "9") {
			t.Errorf("%+v", o.Entity)
		}
		statuses = append(statuses, o.Status)
	}
	if !slices.Equal(statuses, []int{201, 204, 422}) {
		t.Errorf("a batch: %v", statuses)
	}

	tip, err := tips.Create(ctx, "5", client.NewChild{AuthorID: "3", Body: "Go early.", Attributes: map[string]any{"stars": 4}})
	if err != nil || tip.ID == "" || tip.Object != "5" || tip.Attributes["stars"] != 4.0 {
		t.Fatalf("%+v, %v", tip, err)
	}
	stale := tip
	stale.Version = 9
	ops2 := []client.Operation[client.Child]{tips.EditOp(stale, client.ChildEdit{Body: "Go late."})}
	problems := []error{tips.Delete(ctx, stale)}
	_, err = tips.Edit(ctx, stale, client.ChildEdit{Body: "Go late."})
	problems = append(problems, err)
	for o, err := range tips.Batch(ctx, slices.Values(ops2)) {
		problems = append(problems, errors.Join(err, o.Problem))
	}
	for i, err := range problems {
		var p *client.Problem
		var current client.Child
		if !errors.As(err, &p) || !client.IsStale(err) || p.CurrentAs(&current) != nil || current.ID != tip.ID || current.Object != "5" ||
			current.Version != 1 {
			t.Errorf("stale change %d: %v, %+v", i, err, current)
		}
	}
	if _, err := tips.Create(ctx, "5", client.NewChild{AuthorID: "4", Body: "Yes.", ParentID: tip.ID}); err != nil {
		t.Error(err)
	}
	if tip, err = tips.Edit(ctx, tip, client.ChildEdit{Attributes: map[string]any{"stars": 5}}); err != nil || tip.Version != 2 {
		t.Errorf("%+v, %v", tip, err)
	}
	if tree, err := tips.Tree(ctx, "5"); err != nil || len(tree.Items) != 1 || tree.Items[0].ID != tip.ID ||
		len(tree.Items[0].Replies) != 1 || tree.Thread == nil || tree.Items[0].Replies[0].ParentID != tip.ID {
		t.Errorf("%+v, %v", tree, err)
	}
	if one, err := tips.BySlug(ctx, "5", tip.Slug); err != nil || one.ID != tip.ID || one.AsOf.IsZero() {
		t.Errorf("%+v, %v", one, err)
	}
	if s, err := tips.Summary(ctx, "5"); err != nil || s.Object != "5" || s.Total != 2 || s.Thread == nil {
		t.Errorf("%+v, %v", s, err)
	}
	if replies, err := tips.Replies(tip.ID).First(ctx); err != nil || len(replies.Items) != 1 || replies.Items[0].Object != "5" {
		t.Errorf("%+v, %v", replies, err)
	}
	settings, err := tips.Settings(ctx, "5")
	if err == nil {
		settings, err = tips.PutSettings(ctx, settings, client.NewSettings{Premoderated: true})
	}
	if err == nil {
		settings, err = tips.PutSettings(ctx, settings, client.NewSettings{Title: "Tips"})
	}
	if err != nil || settings.Object != "5" || settings.Version != 2 || settings.Title != "Tips" {
		t.Errorf("%+v, %v", settings, err)
	}
	if v, err := tips.SettingsVersions("5").First(ctx); err != nil || len(v.Items) != 2 || !v.Items[1].Settings.Premoderated {
		t.Errorf("%+v, %v", v, err)
	}
	if hidden, err := tips.Moderate(ctx, tip, client.Moderation{State: "HIDDEN"}); err != nil ||
		hidden.State != "HIDDEN" || hidden.AuthorID != "" {
		t.Errorf("%+v, %v", hidden, err)
	}
	counts, err := c.Objects("place").Counts(ctx, "5")
	if err != nil || counts.Edges["visitors"] != 1 || counts.Children["tips"].Total != 2 || counts.AsOf.IsZero() {
		t.Errorf("%+v, %v", counts, err)
	}
	var at client.Response
	places, err := c.Objects("place").CountsOf(ctx, []client.ID{"5", "none", "5"}, client.WithResponse(&at))
	if err != nil || len(places) != 3 || places[0].ID != "5" || places[0].Counts.Edges["visitors"] != 1 ||
		places[2].Counts.Children["tips"].Total != 2 || places[1].Counts.Edges["visitors"] != 0 || at.AsOf.IsZero() {
		t.Errorf("%+v, %v at %s", places, err, at.AsOf)
	}
	checked, err := c.Objects("place").Check(ctx, "user", "7", []client.ID{"none", "5"}, nil)
	if err != nil || len(checked) != 2 || checked[0].Edges["visit"].Active || !checked[1].Edges["visit"].Active ||
		checked[1].Edges["visit"].Attributes["how"] != "car" || checked[1].Edges["visit"].PositionedAt.IsZero() {
		t.Errorf("%+v, %v", checked, err)
	}
	if checked, err = c.Objects("user").Check(ctx, "user", "8", []client.ID{"7"}, []string{"block"}); err != nil ||
		len(checked) != 1 || len(checked[0].Edges) != 1 || checked[0].Edges["block"].Active || !checked[0].Edges["block"].Reversed {
		t.Errorf("%+v, %v", checked, err)
	}
	var unknown *client.UnknownKindError
	for _, err := range []error{
		func() error { _, err := c.Edges("wave").Put(ctx, "7", "8"); return err }(),
		func() error { _, err := c.Children("wave").Get(ctx, tip.ID); return err }(),
		func() error { _, err := c.Objects("wave").Counts(ctx, "8"); return err }(),
		func() error { _, err := c.Edges("wave").Forward("7").First(ctx); return err }(),
	} {
		if !isUnknown(err, &unknown) || unknown.Kind != "wave" || len(unknown.Have) < 3 {
			t.Errorf("an unknown kind: %v", err)
		}
	}
	// The built-in kinds work by their names too.
	if like, err := c.Edges("like").Put(ctx, "7", "42"); err != nil || like.From != "7" || like.To != "42" {
		t.Errorf("%+v, %v", like, err)
	}
	if r, err := c.Edges("follow").Check(ctx, []client.Pair{{From: "7", To: "8"}}); err != nil || r[0].From != "7" {
		t.Errorf("%+v, %v", r, err)
	}
}

func isUnknown(err error, to **client.UnknownKindError) bool {
	e, ok := err.(*client.UnknownKindError) //nolint:errorlint // it is not wrapped
	*to = e
	return ok
}

// The server ends and its directory disappears with the test binary, even if that is killed.
func TestTheServerEndsWithTheTests(t *testing.T) {
	if dir := os.Getenv("CLIENTTEST_CHILD_TMP"); dir != "" {
		clienttest.New(t)
		fmt.Println("started")
		select {} // until the test kills it
	}
	dir, err := os.MkdirTemp("", "tidings-clienttest-tmp-")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestTheServerEndsWithTheTests$")
	cmd.Env = append(os.Environ(), "CLIENTTEST_CHILD_TMP="+dir, "TMPDIR="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	said := make([]byte, 8)
	if _, err := out.Read(said); err != nil || !strings.HasPrefix("started\n", string(said)) {
		t.Fatalf("%q, %v", said, err)
	}
	left := func() []string {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		return names
	}
	if len(left()) != 1 {
		t.Errorf("while it runs there is %q", left())
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // its error is that it was killed
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(time.Minute); len(left()) > 0; <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("%q is left", left())
		}
	}
}

// The behavior of the built-in kinds against the API itself, which the document does not describe.
func TestTheBuiltInKinds(t *testing.T) {
	ctx := t.Context()
	c := clienttest.New(t, client.WithActor("alice"))
	s := c.Session()
	m, err := s.Memberships.PutWith(ctx, "7", "5", client.MembershipChanges{Role: "owner"})
	if err == nil {
		m, err = s.Memberships.Patch(ctx, m, client.MembershipChanges{Role: "moderator"})
	}
	if err != nil || m.Attributes.Role != "moderator" || m.Version != 2 {
		t.Errorf("%+v, %v", m, err)
	}
	if page, err := s.Memberships.Members("5", client.Role("moderator")).First(ctx); err != nil || len(page.Items) != 1 ||
		page.Items[0].UserID != "7" {
		t.Errorf("%+v, %v", page, err)
	}
	if err := s.Memberships.Remove(ctx, "7", "5", client.IfMatch(1)); !client.IsStale(err) {
		t.Errorf("a guarded removal: %v", err)
	}
	review, err := s.Reviews.Create(ctx, "9", client.NewReview{AuthorID: "3", Body: "Good.",
		Attributes: client.ReviewAttributes{Rating: 5}})
	if err == nil {
		review, err = s.Reviews.Edit(ctx, review, client.ReviewEdit{Attributes: &client.ReviewChanges{Rating: 3}})
	}
	if err != nil || review.Attributes.Rating != 3 || review.Body != "Good." {
		t.Errorf("%+v, %v", review, err)
	}
	_, err = s.Reviews.Create(ctx, "9", client.NewReview{AuthorID: "3", Body: "Again.", Attributes: client.ReviewAttributes{Rating: 1}})
	var first client.Review
	if p := new(client.Problem); !errors.As(err, &p) || p.Code != client.CodeAlreadyWritten || p.CurrentAs(&first) != nil ||
		first.ReviewID != review.ReviewID {
		t.Errorf("a second review: %v", err)
	}
	if n, err := s.Products.Counts(ctx, "9"); err != nil || n.Reviews.Aggregates.Rating.Average() != 3 {
		t.Errorf("%+v, %v", n, err)
	}
	// The same key makes one comment. A change of an old version is stale. A deleted comment is
	// gone.
	var meta client.Response
	var comments [2]client.Comment
	for i := range comments {
		if comments[i], err = s.Comments.Create(ctx, "1", client.NewComment{AuthorID: "3", Body: "Hello"}, client.IdempotencyKey("k"),
			client.WithResponse(&meta)); err != nil {
			t.Fatal(err)
		}
	}
	if comments[0].CommentID != comments[1].CommentID || !meta.Replayed ||
		meta.Location != "/v1/comments/"+comments[0].CommentID || meta.Token == "" {
		t.Errorf("%+v, %+v", comments, meta)
	}
	if err := s.Comments.Delete(ctx, comments[0]); err != nil {
		t.Error(err)
	}
	if _, err := s.Comments.Edit(ctx, comments[0], client.CommentEdit{Body: "x"}); !client.IsStale(err) && !client.IsGone(err) {
		t.Errorf("an edit of what is gone: %v", err)
	}
	if _, err := s.Comments.Get(ctx, comments[0].CommentID, client.IfNoneMatch(`"2"`)); !errors.Is(err, client.ErrNotModified) {
		t.Errorf("what has not changed: %v", err)
	}
	batchOfManyRequests(t, s)
	removal, err := s.Users.RemoveEdges(ctx, "7", client.EdgesToRemove{Kinds: []string{"membership"}})
	for err == nil && removal.State != "DONE" {
		removal, err = s.EdgeRemoval(ctx, removal.ID)
	}
	if err != nil || removal.Removed["membership"] != 1 || removal.Actor != "alice" {
		t.Errorf("%+v, %v", removal, err)
	}
	for _, err := range s.DLQ.List(client.DLQFilter{AggregateType: "follow", DeadBefore: time.Now()}).All(ctx) {
		t.Errorf("the DLQ: %v", err)
	}
}

// batchOfManyRequests writes a batch that is longer than one request. A read right after it
// includes the writes whose tokens the session has, which are the last 64. The others are there
// once the projection has applied them.
func batchOfManyRequests(t *testing.T, s *client.Session) {
	t.Helper()
	const all, tokens = 1100, 64
	ops := func(yield func(client.Operation[client.Comment]) bool) {
		for i := range all {
			if !yield(s.Comments.CreateOp("2", client.NewComment{AuthorID: event.IDOf(i + 1), Body: fmt.Sprint(i)})) {
				return
			}
		}
	}
	written := 0
	for o, err := range s.Comments.Batch(t.Context(), ops) {
		if err != nil || o.Err() != nil || o.Entity.Body != fmt.Sprint(o.Index) {
			t.Fatalf("%+v, %v", o, err)
		}
		written++
	}
	read := func() map[string]bool {
		t.Helper()
		bodies := make(map[string]bool)
		for c, err := range s.Comments.List("2", client.PageSize(200)).All(t.Context()) {
			if err != nil {
				t.Fatal(err)
			}
			if bodies[c.Body] {
				t.Errorf("comment %s is read twice", c.Body)
			}
			bodies[c.Body] = true
		}
		return bodies
	}
	bodies := read()
	for i := all - tokens; i < all; i++ {
		if !bodies[fmt.Sprint(i)] {
			t.Errorf("the read right after the batch lacks comment %d", i)
		}
	}
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(time.Minute); len(bodies) < all; bodies = read() {
		if <-tick.C; time.Now().After(end) {
			break
		}
	}
	if written != all || len(bodies) != all {
		t.Errorf("%d written, %d read", written, len(bodies))
	}
}
