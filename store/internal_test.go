package store

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/testkit"
)

func TestStatements(t *testing.T) {
	pool := testkit.Postgres(t).Pool(t, postgres.RoleAPI)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for name, sql := range map[string]string{
		"follow": followSQL, "unfollow": unfollowSQL, "getFollows": getFollowsSQL, "commentGet": commentGetSQL,
		"commentSurroundings": commentSurroundingsSQL, "commentKeys": commentKeysSQL, "commentReplay": commentReplaySQL,
		"commentRelease": commentReleaseSQL, "commentCreate": commentCreateSQL, "commentEdit": commentEditSQL,
		"commentDelete": commentDeleteSQL, "authenticate": authenticateSQL, "createToken": createTokenSQL, "ensureToken": ensureTokenSQL,
	} {
		positional, _, err := pgx.NamedArgs{}.RewriteQuery(t.Context(), conn.Conn(), sql, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Conn().Prepare(t.Context(), name, positional); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestATakenSlugIsReplaced(t *testing.T) {
	db := testkit.Postgres(t)
	s := New(db.Pool(t, postgres.RoleAPI))
	next := []string{"aaaaaaaa", "aaaaaaaa", "bbbbbbbb", "aaaaaaaa", "cccccccc"}
	s.slug = func() string {
		slug := next[0]
		next = next[1:]
		return slug
	}
	m := Meta{Actor: "tester"}
	out, err := s.Create(t.Context(), 1, []NewComment{
		{Meta: m, PostID: 1, AuthorID: 1, Body: "a"}, {Meta: m, PostID: 1, AuthorID: 1, Body: "b"}, {Meta: m, PostID: 1, AuthorID: 1, Body: "c"},
	})
	if err != nil {
		t.Fatal(err)
	}
	slugs := map[string]int{}
	for _, o := range out {
		slugs[o.Comment.Slug]++
	}
	if diff := cmp.Diff(map[string]int{"aaaaaaaa": 1, "bbbbbbbb": 1, "cccccccc": 1}, slugs); diff != "" {
		t.Errorf("slugs (-want +got):\n%s", diff)
	}
	s.slug = func() string { return "aaaaaaaa" }
	if _, err := s.Create(t.Context(), 1, []NewComment{{Meta: m, PostID: 1, AuthorID: 1, Body: "d"}}); err == nil {
		t.Error("no free slug: no error")
	}
	if out, err := s.Create(t.Context(), 1, []NewComment{{Meta: m, PostID: 2, AuthorID: 1, Body: "d"}}); err != nil || out[0].Comment.Slug != "aaaaaaaa" {
		t.Errorf("another post may have the slug: %+v, %v", out, err)
	}
}

func TestRounds(t *testing.T) {
	keys := []string{"a", "b", "a", "", "c", "a"}
	got := rounds(len(keys), func(i int) (string, bool) { return keys[i], keys[i] != "" })
	if diff := cmp.Diff([][]int{{0, 1, 4}, {2}, {5}}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
