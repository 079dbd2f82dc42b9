package client_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/tidings/tidings/api"
	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/kinds"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/projections/followercounts"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/store"
)

// object is a JSON object.
type object = map[string]any

// document is the OpenAPI document of an API with the built-in kinds. The API needs no servers for
// it.
func document(t *testing.T) object {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), "postgres://127.0.0.1:1/none")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	h, err := api.New(api.Config{CursorKey: strings.Repeat("ab", 32), MaxBodyBytes: 128 << 10, MaxBatchBytes: 4 << 20,
		RequestTimeout: 10 * time.Second, AddressConnections: 1000, MaxRequests: 512, MaxWait: time.Second},
		api.Deps{Store: store.New(pool, nil), Tokens: pool, DLQ: outbox.NewDLQ(pool, nil), Projections: pool,
			Fleet: []projections.Projection{followercounts.New(kinds.Builtin), threadcache.New(kinds.Builtin)},
			Log:   slog.New(slog.DiscardHandler), Reg: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/v1/openapi.json", nil))
	var doc object
	if err := json.Unmarshal(w.Body.Bytes(), &doc); err != nil {
		t.Fatal(err)
	}
	return doc
}

const exampleUUID = "0196b2d4-7c3e-7b6a-9d2f-1a2b3c4d5e6f"

// method calls the method of an operation and returns its result.
type method func(ctx context.Context, c *client.Calls, opts ...client.Option) (any, error)

// typed makes a method from a function that returns a result.
func typed[T any](f func(context.Context, *client.Calls, []client.Option) (T, error)) method {
	return func(ctx context.Context, c *client.Calls, opts ...client.Option) (any, error) {
		return f(ctx, c, opts)
	}
}

// bare makes a method from a function without a result.
func bare(f func(context.Context, *client.Calls, []client.Option) error) method {
	return func(ctx context.Context, c *client.Calls, opts ...client.Option) (any, error) {
		return nil, f(ctx, c, opts)
	}
}

// listed makes a method from a function that returns a list.
func listed[T any](f func(*client.Calls, []client.Option) *client.List[T]) method {
	return func(ctx context.Context, c *client.Calls, opts ...client.Option) (any, error) {
		return f(c, opts).First(ctx)
	}
}

// batched makes a method from a batch.
func batched[T any](f func(context.Context, *client.Calls, []client.Option) func(func(client.Outcome[T], error) bool)) method {
	return func(ctx context.Context, c *client.Calls, opts ...client.Option) (any, error) {
		var last any
		for o, err := range f(ctx, c, opts) {
			if err != nil {
				return nil, err
			}
			last = o
		}
		return last, nil
	}
}

// objectMethods returns the methods about many objects.
func objectMethods[T, N any](all map[string]method, plural string, id client.ID, of func(*client.Calls) client.Objects[T, N]) {
	all["count-"+plural] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) ([]client.Counted[N], error) {
		return of(c).CountsOf(ctx, []client.ID{id}, o...)
	})
}

// edgeMethods returns the methods of every kind of edges.
func edgeMethods[E, R, V any](all map[string]method, put, get, remove, versions, plural string, to client.ID,
	of func(*client.Calls) client.Edges[E, R, V]) {
	all[put] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (E, error) {
		return of(c).Put(ctx, "7", to, o...)
	})
	all[get] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (E, error) {
		return of(c).Get(ctx, "7", to, o...)
	})
	all[remove] = bare(func(ctx context.Context, c *client.Calls, o []client.Option) error {
		return of(c).Remove(ctx, "7", to, o...)
	})
	all[versions] = listed(func(c *client.Calls, o []client.Option) *client.List[V] { return of(c).Versions("7", to, o...) })
	all["check-"+plural] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) ([]R, error) {
		return of(c).Check(ctx, []client.Pair{{From: "7", To: to}}, o...)
	})
	all["batch-"+plural] = batched(func(ctx context.Context, c *client.Calls,
		o []client.Option) func(func(client.Outcome[E], error) bool) {
		return of(c).Batch(ctx, slices.Values([]client.Operation[E]{of(c).PutOp("7", to), of(c).RemoveOp("7", to)}), o...)
	})
}

// childMethods returns the methods of every kind of children.
func childMethods[C client.Versioned, N, D, V any](all map[string]method, name, versions, byUser string,
	of func(*client.Calls) client.Children[C, N, D, V], created N, was C, edit D) {
	all["create-"+name] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (C, error) {
		return of(c).Create(ctx, "5", created, o...)
	})
	all["get-"+name] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (C, error) {
		return of(c).Get(ctx, exampleUUID, o...)
	})
	all["edit-"+name] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (C, error) {
		return of(c).Edit(ctx, was, edit, o...)
	})
	all["delete-"+name] = bare(func(ctx context.Context, c *client.Calls, o []client.Option) error {
		return of(c).Delete(ctx, was, o...)
	})
	all["list-"+name+"s"] = listed(func(c *client.Calls, o []client.Option) *client.List[C] { return of(c).List("5", o...) })
	all[byUser] = listed(func(c *client.Calls, o []client.Option) *client.List[C] { return of(c).ByUser("7", o...) })
	all[versions] = listed(func(c *client.Calls, o []client.Option) *client.List[V] { return of(c).Versions(exampleUUID, o...) })
	all["batch-"+name+"s"] = batched(func(ctx context.Context, c *client.Calls,
		o []client.Option) func(func(client.Outcome[C], error) bool) {
		return of(c).Batch(ctx, slices.Values([]client.Operation[C]{of(c).CreateOp("5", created), of(c).EditOp(was, edit),
			of(c).DeleteOp(was)}), o...)
	})
}

// methods has the method of every operation, by operationId.
func methods() map[string]method {
	all := make(map[string]method)
	edgeMethods(all, "put-follow", "get-follow", "remove-follow", "list-follow-versions", "follows", "42",
		func(c *client.Calls) client.Edges[client.Follow, client.FollowRelation, client.FollowVersion] {
			return c.Follows.Edges
		})
	edgeMethods(all, "put-like", "get-like", "remove-like", "list-like-versions", "likes", "42",
		func(c *client.Calls) client.Edges[client.Like, client.LikeRelation, client.LikeVersion] {
			return c.Likes.Edges
		})
	edgeMethods(all, "put-share", "get-share", "remove-share", "list-share-versions", "shares", "42",
		func(c *client.Calls) client.Edges[client.Share, client.ShareRelation, client.ShareVersion] {
			return c.Shares.Edges
		})
	edgeMethods(all, "put-membership", "get-membership", "remove-membership", "list-membership-versions", "memberships", "42",
		func(c *client.Calls) client.Edges[client.Membership, client.MembershipRelation, client.MembershipVersion] {
			return c.Memberships.Edges
		})
	edgeMethods(all, "put-like-comment", "get-like-comment", "remove-like-comment", "list-like-comment-versions", "comment-likes",
		exampleUUID,
		func(c *client.Calls) client.Edges[client.LikeComment, client.LikeCommentRelation, client.LikeCommentVersion] {
			return c.CommentLikes.Edges
		})
	edgeMethods(all, "put-vote", "get-vote", "remove-vote", "list-vote-versions", "votes", exampleUUID,
		func(c *client.Calls) client.Edges[client.Vote, client.VoteRelation, client.VoteVersion] {
			return c.Votes.Edges
		})
	up := client.VoteChanges{Value: 1}
	all["put-vote"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.Vote, error) {
		return c.Votes.PutWith(ctx, "7", exampleUUID, up, append(o, client.IfMatch(3))...)
	})
	all["patch-vote"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.Vote, error) {
		vote := client.Vote{UserID: "7", CommentID: exampleUUID, EdgeState: client.EdgeState{Version: 3}}
		return c.Votes.Patch(ctx, vote, up, o...)
	})
	all["remove-vote"] = bare(func(ctx context.Context, c *client.Calls, o []client.Option) error {
		return c.Votes.Remove(ctx, "7", exampleUUID, append(o, client.IfMatchAny())...)
	})
	all["batch-votes"] = batched(func(ctx context.Context, c *client.Calls,
		o []client.Option) func(func(client.Outcome[client.Vote], error) bool) {
		return c.Votes.Batch(ctx, slices.Values([]client.Operation[client.Vote]{c.Votes.PutWithOp("7", exampleUUID, up).IfVersion(3),
			c.Votes.RemoveOp("7", exampleUUID).IfAny()}), o...)
	})
	all["list-comment-likers"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.UserEntry] {
		return c.CommentLikes.Likers(exampleUUID, o...)
	})
	all["list-user-liked-comments"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.CommentEntry] {
		return c.CommentLikes.LikedComments("7", o...)
	})
	all["list-comment-voters"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.VoterEntry] {
		return c.Votes.Voters(exampleUUID, o...)
	})
	all["list-user-voted-comments"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.VotedCommentEntry] {
		return c.Votes.VotedComments("7", o...)
	})
	owner, member := client.MembershipChanges{Role: "owner"},
		client.Membership{UserID: "7", GroupID: "42", EdgeState: client.EdgeState{Version: 3}}
	all["put-membership"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.Membership, error) {
		return c.Memberships.PutWith(ctx, "7", "42", owner, append(o, client.IfMatch(3))...)
	})
	all["patch-membership"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.Membership, error) {
		return c.Memberships.Patch(ctx, member, owner, o...)
	})
	all["remove-membership"] = bare(func(ctx context.Context, c *client.Calls, o []client.Option) error {
		return c.Memberships.Remove(ctx, "7", "42", append(o, client.IfMatchAny())...)
	})
	all["batch-memberships"] = batched(func(ctx context.Context, c *client.Calls,
		o []client.Option) func(func(client.Outcome[client.Membership], error) bool) {
		m := c.Memberships
		return m.Batch(ctx, slices.Values([]client.Operation[client.Membership]{m.PutWithOp("7", "42", owner).IfVersion(3),
			m.RemoveOp("7", "42").IfAny()}), o...)
	})
	all["list-user-followers"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.UserEntry] {
		return c.Follows.Followers("7", o...)
	})
	all["list-user-following"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.UserEntry] {
		return c.Follows.Following("7", o...)
	})
	all["list-post-likers"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.UserEntry] {
		return c.Likes.Likers("7", o...)
	})
	all["list-user-likes"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.PostEntry] {
		return c.Likes.ByUser("7", o...)
	})
	all["list-post-sharers"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.UserEntry] {
		return c.Shares.Sharers("7", o...)
	})
	all["list-user-shares"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.PostEntry] {
		return c.Shares.ByUser("7", o...)
	})
	all["list-group-members"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.MemberEntry] {
		return c.Memberships.Members("7", o...)
	})
	all["list-user-groups"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.GroupEntry] {
		return c.Memberships.Groups("7", o...)
	})

	at := client.ChildState{Version: 3}
	comment := client.Comment{CommentID: exampleUUID, ChildState: at}
	childMethods(all, "comment", "list-comment-versions", "list-user-comments",
		func(c *client.Calls) client.Children[client.Comment, client.NewComment, client.CommentEdit, client.CommentVersion] {
			return c.Comments.Children
		},
		client.NewComment{AuthorID: "3", Body: "Well said.", ParentID: exampleUUID}, comment, client.CommentEdit{Body: "Well put."})
	childMethods(all, "message", "list-message-versions", "list-user-messages",
		func(c *client.Calls) client.Children[client.Message, client.NewMessage, client.MessageEdit, client.MessageVersion] {
			return c.Messages.Children
		},
		client.NewMessage{AuthorID: "3", Body: "Hello."}, client.Message{MessageID: exampleUUID, ChildState: at},
		client.MessageEdit{Body: "Hi."})
	childMethods(all, "review", "list-review-versions", "list-user-reviews",
		func(c *client.Calls) client.Children[client.Review, client.NewReview, client.ReviewEdit, client.ReviewVersion] {
			return c.Reviews.Children
		},
		client.NewReview{AuthorID: "3", Body: "Good.", Attributes: client.ReviewAttributes{Rating: 5}},
		client.Review{ReviewID: exampleUUID, ChildState: at},
		client.ReviewEdit{Body: "Fine.", Attributes: &client.ReviewChanges{Rating: 4}})
	all["moderate-message"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.Message, error) {
		return c.Messages.Moderate(ctx, client.Message{MessageID: exampleUUID, ChildState: at},
			client.Moderation{State: "HIDDEN", Reason: "spam"}, o...)
	})
	all["list-pending-messages"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.Message] {
		return c.Messages.Pending(o...)
	})
	all["get-message-settings"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.MessageSettings, error) {
		return c.Messages.Settings(ctx, "5", o...)
	})
	all["put-message-settings"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.MessageSettings, error) {
		return c.Messages.PutSettings(ctx, client.MessageSettings{ConversationID: "5", ThreadState: client.ThreadState{Version: 3}},
			client.NewSettings{Locked: true, Title: "News"}, o...)
	})
	all["list-message-settings-versions"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.MessageSettingsVersion] {
		return c.Messages.SettingsVersions("5", o...)
	})
	all["moderate-review"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.Review, error) {
		return c.Reviews.Moderate(ctx, client.Review{ReviewID: exampleUUID, ChildState: at},
			client.Moderation{State: "HIDDEN", Reason: "spam"}, o...)
	})
	all["list-pending-reviews"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.Review] {
		return c.Reviews.Pending(o...)
	})
	all["get-review-settings"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.ReviewSettings, error) {
		return c.Reviews.Settings(ctx, "5", o...)
	})
	all["put-review-settings"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.ReviewSettings, error) {
		return c.Reviews.PutSettings(ctx, client.ReviewSettings{ProductID: "5", ThreadState: client.ThreadState{Version: 3}},
			client.NewSettings{Locked: true, Title: "News"}, o...)
	})
	all["list-review-settings-versions"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.ReviewSettingsVersion] {
		return c.Reviews.SettingsVersions("5", o...)
	})
	all["list-comment-replies"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.Comment] {
		return c.Comments.Replies(exampleUUID, o...)
	})
	all["list-pending-comments"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.Comment] {
		return c.Comments.Pending(o...)
	})
	all["moderate-comment"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.Comment, error) {
		return c.Comments.Moderate(ctx, comment, client.Moderation{State: "HIDDEN", Reason: "off topic"}, o...)
	})
	all["get-comment-summary"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.CommentSummary, error) {
		return c.Comments.Summary(ctx, "5", o...)
	})
	all["get-message-summary"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.MessageSummary, error) {
		return c.Messages.Summary(ctx, "5", o...)
	})
	all["get-review-summary"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.ReviewSummary, error) {
		return c.Reviews.Summary(ctx, "5", o...)
	})
	all["get-comment-tree"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.CommentTree, error) {
		return c.Comments.Tree(ctx, "5", o...)
	})
	all["get-comment-by-slug"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.CommentWithThread, error) {
		return c.Comments.BySlug(ctx, "5", "well-said", o...)
	})
	all["get-thread"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.ThreadSettings, error) {
		return c.Comments.Settings(ctx, "5", o...)
	})
	all["put-thread"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.ThreadSettings, error) {
		return c.Comments.PutSettings(ctx, client.ThreadSettings{PostID: "5", ThreadState: client.ThreadState{Version: 3}},
			client.NewSettings{Locked: true, Title: "News"}, o...)
	})
	all["list-thread-versions"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.ThreadVersion] {
		return c.Comments.SettingsVersions("5", o...)
	})

	all["get-user-counts"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.UserCounts, error) {
		return c.Users.Counts(ctx, "7", o...)
	})
	all["get-post-counts"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.PostCounts, error) {
		return c.Posts.Counts(ctx, "7", o...)
	})
	all["get-group-counts"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.GroupCounts, error) {
		return c.Groups.Counts(ctx, "7", o...)
	})
	all["get-product-counts"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.ProductCounts, error) {
		return c.Products.Counts(ctx, "7", o...)
	})
	all["get-conversation-counts"] = typed(func(ctx context.Context, c *client.Calls,
		o []client.Option) (client.ConversationCounts, error) {
		return c.Conversations.Counts(ctx, "7", o...)
	})
	objectMethods(all, "users", "7", func(c *client.Calls) client.Objects[client.UserCounts, client.UserNumbers] {
		return c.Users.Objects
	})
	objectMethods(all, "posts", "7", func(c *client.Calls) client.Objects[client.PostCounts, client.PostNumbers] {
		return c.Posts.Objects
	})
	objectMethods(all, "groups", "7", func(c *client.Calls) client.Objects[client.GroupCounts, client.GroupNumbers] {
		return c.Groups.Objects
	})
	objectMethods(all, "products", "7", func(c *client.Calls) client.Objects[client.ProductCounts, client.ProductNumbers] {
		return c.Products
	})
	objectMethods(all, "conversations", "7",
		func(c *client.Calls) client.Objects[client.ConversationCounts, client.ConversationNumbers] {
			return c.Conversations
		})
	const commented = "0196b2d4-7c00-7000-8000-000000000001"
	objectMethods(all, "comments", commented, func(c *client.Calls) client.Objects[client.CommentCounts, client.CommentNumbers] {
		return c.Comments.Objects
	})
	all["get-comment-counts"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.CommentCounts, error) {
		return c.Comments.Counts(ctx, commented, o...)
	})
	all["check-comments"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) ([]client.CommentCheck, error) {
		return c.Comments.Check(ctx, "7", []client.ID{commented}, []string{"vote"}, o...)
	})
	all["check-users"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) ([]client.UserCheck, error) {
		return c.Users.Check(ctx, "7", []client.ID{"42"}, []string{"follow"}, o...)
	})
	all["check-posts"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) ([]client.PostCheck, error) {
		return c.Posts.Check(ctx, "7", []client.ID{"42"}, []string{"like"}, o...)
	})
	all["check-groups"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) ([]client.GroupCheck, error) {
		return c.Groups.Check(ctx, "7", []client.ID{"42"}, []string{"membership"}, o...)
	})
	all["list-user-mutuals"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.Mutuals, error) {
		return c.Users.Mutuals(ctx, "7", "8", o...)
	})
	which := client.EdgesToRemove{Kinds: []string{"any"}, Direction: "both"}
	all["remove-user-edges"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.EdgeRemoval, error) {
		return c.Users.RemoveEdges(ctx, "7", which, o...)
	})
	all["remove-post-edges"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.EdgeRemoval, error) {
		return c.Posts.RemoveEdges(ctx, "7", which, o...)
	})
	all["remove-group-edges"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.EdgeRemoval, error) {
		return c.Groups.RemoveEdges(ctx, "7", which, o...)
	})
	all["remove-comment-edges"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.EdgeRemoval, error) {
		return c.Comments.RemoveEdges(ctx, exampleUUID, which, o...)
	})
	all["get-edge-removal"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.EdgeRemoval, error) {
		return c.EdgeRemoval(ctx, exampleUUID, o...)
	})
	all["list-kinds"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.KindList, error) {
		return c.Kinds(ctx, o...)
	})

	exports := map[string]func(*client.Calls, ...client.Option) *client.Export{
		"follows":       func(c *client.Calls, o ...client.Option) *client.Export { return c.Follows.Export(o...) },
		"likes":         func(c *client.Calls, o ...client.Option) *client.Export { return c.Likes.Export(o...) },
		"shares":        func(c *client.Calls, o ...client.Option) *client.Export { return c.Shares.Export(o...) },
		"memberships":   func(c *client.Calls, o ...client.Option) *client.Export { return c.Memberships.Export(o...) },
		"comment-likes": func(c *client.Calls, o ...client.Option) *client.Export { return c.CommentLikes.Export(o...) },
		"votes":         func(c *client.Calls, o ...client.Option) *client.Export { return c.Votes.Export(o...) },
		"comments":      func(c *client.Calls, o ...client.Option) *client.Export { return c.Comments.Export(o...) },
		"messages":      func(c *client.Calls, o ...client.Option) *client.Export { return c.Messages.Export(o...) },
		"reviews":       func(c *client.Calls, o ...client.Option) *client.Export { return c.Reviews.Export(o...) },
		"threads":       func(c *client.Calls, o ...client.Option) *client.Export { return c.ExportSettings(o...) },
	}
	for plural, export := range exports {
		all["export-"+plural] = func(ctx context.Context, c *client.Calls, o ...client.Option) (any, error) {
			x := export(c, append(o, client.ExportLines(7))...).Resume("cursor", "7,42")
			for _, err := range x.All(ctx) {
				if err != nil {
					return nil, err
				}
			}
			return x.Head(), nil
		}
	}

	filter := client.DLQFilter{AggregateType: "follow", AggregateID: "7", EventType: "created",
		DeadBefore: time.Now(), DeadAfter: time.Now()}
	all["list-dlq-messages"] = listed(func(c *client.Calls, o []client.Option) *client.List[client.DeadMessage] {
		return c.DLQ.List(filter, o...)
	})
	all["get-dlq-message"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.DeadMessageFull, error) {
		return c.DLQ.Get(ctx, 7, o...)
	})
	all["retry-dlq-message"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.DLQAction, error) {
		return c.DLQ.Retry(ctx, 7, "mended", o...)
	})
	all["discard-dlq-message"] = typed(func(ctx context.Context, c *client.Calls, o []client.Option) (client.DLQAction, error) {
		return c.DLQ.Discard(ctx, 7, "test", o...)
	})
	return all
}

// options are query parameters for which a method has no argument, with a value.
func options() map[string]client.Option {
	return map[string]client.Option{
		"limit": client.PageSize(7), "cursor": client.Cursor("next"), "order": client.Order("newest"), "skip": client.Skip(3),
		"around": client.Around(exampleUUID), "counts": client.CountsIn("likers"), "role": client.Role("owner"),
		"post_id":         client.Query("post_id", "5"),
		"conversation_id": client.Query("conversation_id", "5"), "product_id": client.Query("product_id", "5"),
	}
}

// conformance compares the client with a document.
type conformance struct {
	doc     object
	found   []string
	request *http.Request
	body    []byte
	answers []byte
	status  int
	media   string
}

func (c *conformance) differs(format string, args ...any) {
	c.found = append(c.found, fmt.Sprintf(format, args...))
}

// RoundTrip keeps the request, and answers as the document describes.
func (c *conformance) RoundTrip(r *http.Request) (*http.Response, error) {
	c.request, c.body = r, nil
	if r.Body != nil {
		var err error
		if c.body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
	}
	answer := c.answers
	if c.media == ndjson && c.body != nil { // an outcome for each line
		answer = bytes.Repeat(append(slices.Clone(c.answers), '\n'), bytes.Count(c.body, []byte("\n")))
	}
	return &http.Response{StatusCode: c.status, Header: http.Header{"Content-Type": {c.media}}, Body: io.NopCloser(bytes.NewReader(answer)),
		ContentLength: int64(len(answer)), Request: r}, nil
}

const ndjson = "application/x-ndjson"

// differences returns the differences between the client and the document.
func differences(t *testing.T, doc object) []string {
	t.Helper()
	c := &conformance{doc: doc}
	all := methods()
	for path, item := range doc["paths"].(object) {
		for verb, op := range item.(object) {
			op := op.(object)
			id := op["operationId"].(string)
			call, ok := all[id]
			if !ok {
				c.differs("%s %s: the operation %s has no method", strings.ToUpper(verb), path, id)
				continue
			}
			delete(all, id)
			c.operation(t, strings.ToUpper(verb), path, id, op, call)
		}
	}
	for id := range all {
		c.differs("the operation %s is not in the document", id)
	}
	slices.Sort(c.found)
	return c.found
}

// operation calls a method, and compares its request and its result with an operation of the
// document.
func (c *conformance) operation(t *testing.T, verb, path, id string, op object, call method) {
	t.Helper()
	result := c.success(op)
	cl, err := client.New("http://api.test", client.WithToken("secret"), client.WithHTTPClient(&http.Client{Transport: c}),
		client.WithRetry(client.Retry{}))
	if err != nil {
		t.Fatal(err)
	}
	queries, headers := map[string]bool{}, map[string]bool{}
	var opts []client.Option
	for _, p := range list(op["parameters"]) {
		name := p["name"].(string)
		switch p["in"] {
		case "query":
			queries[name] = true
			if o, ok := options()[name]; ok {
				opts = append(opts, o)
			}
		case "header":
			headers[name] = true
		}
	}
	if headers["If-None-Match"] && verb == http.MethodGet {
		opts = append(opts, client.IfNoneMatch(`"3"`))
	}
	session := cl.Session("a-token")
	c.request = nil
	got, err := call(t.Context(), &session.Calls, append(opts, client.Actor("alice"), client.Header("traceparent", "00-1"))...)
	if c.request == nil {
		c.differs("%s: nothing was sent: %v", id, err)
		return
	}
	if err != nil {
		c.differs("%s: an answer that the document allows: %v", id, err)
	}
	pattern := regexp.MustCompile("^" + regexp.MustCompile(`\\\{[a-z_]+\\\}`).ReplaceAllString(regexp.QuoteMeta(path), "[^/:]+") + "$")
	if c.request.Method != verb || !pattern.MatchString(c.request.URL.Path) {
		c.differs("%s: sends %s %s, want %s %s", id, c.request.Method, c.request.URL.Path, verb, path)
	}
	if got, want := slices.Sorted(maps.Keys(c.request.URL.Query())), slices.Sorted(maps.Keys(queries)); !slices.Equal(got, want) {
		c.differs("%s: sends the parameters %q, the document has %q", id, got, want)
	}
	for _, name := range []string{"Tidings-Token", "If-Match", "Idempotency-Key"} {
		if sends := c.request.Header.Get(name) != ""; sends != headers[name] {
			c.differs("%s: sends the header %s: %v, the document has it: %v", id, name, sends, headers[name])
		}
	}
	c.sent(id, op)
	if got != nil {
		c.read(id, reflect.TypeOf(got), result)
	}
	if strings.HasPrefix(id, "export-") {
		c.same(id+" state", reflect.TypeFor[client.ExportState](), object{"$ref": "#/components/schemas/ExportState"}, 0)
	}
}

// success prepares the answer, and returns its schema.
func (c *conformance) success(op object) object {
	c.answers, c.media, c.status = nil, "", http.StatusNoContent
	for status, r := range op["responses"].(object) {
		content, _ := r.(object)["content"].(object)
		if status[0] != '2' || content == nil {
			continue
		}
		fmt.Sscan(status, &c.status)
		if content[ndjson] != nil && content["application/json"] == nil { // an export
			c.media = ndjson
			c.answers, _ = json.Marshal(object{"export": c.example(object{"$ref": "#/components/schemas/ExportHead"}, 0)})
			c.answers = append(c.answers, "\n{\"end\":\"done\"}\n"...)
			return object{"$ref": "#/components/schemas/ExportHead"}
		}
		if content[ndjson] != nil { // an outcome of its own type
			schema := object{"$ref": "#/components/schemas/BatchOutcome"}
			c.media = ndjson
			c.answers = []byte(`{"line":1,"status":204}`)
			return schema
		}
		c.media = "application/json"
		schema := content[c.media].(object)["schema"].(object)
		c.answers, _ = json.Marshal(c.example(schema, 0))
		return schema
	}
	return nil
}

// example returns a value with every member of the schema.
func (c *conformance) example(schema object, depth int) any {
	schema = c.resolve(schema)
	kind := kindOf(schema)
	if e, ok := schema["enum"].([]any); ok {
		return e[0]
	}
	switch kind {
	case "object":
		all := object{}
		properties, _ := schema["properties"].(object)
		for name, p := range properties {
			if depth < 6 {
				all[name] = c.example(p.(object), depth+1)
			}
		}
		return all
	case "array":
		if depth > 4 {
			return []any{}
		}
		return []any{c.example(schema["items"].(object), depth+1)}
	case "integer":
		return 3
	case "boolean":
		return true
	case "string":
		switch {
		case schema["format"] == "date-time":
			return "2026-11-22T10:00:00.000000Z"
		case isID(schema) || isNumber(schema) || strings.Contains(fmt.Sprint(schema["description"]), "decimal 64-bit number"):
			return "42"
		}
		return "text"
	}
	return object{}
}

// sent compares the body of the request with the document.
func (c *conformance) sent(id string, op object) {
	body, _ := op["requestBody"].(object)
	if body == nil {
		if c.body != nil {
			c.differs("%s: sends a body", id)
		}
		return
	}
	content := body["content"].(object)
	media := c.request.Header.Get("Content-Type")
	if content[media] == nil {
		c.differs("%s: sends a body of the type %q", id, media)
		return
	}
	if media != ndjson {
		var v any
		if err := json.Unmarshal(c.body, &v); err != nil {
			c.differs("%s: sends %s: %v", id, c.body, err)
		}
		c.fits(id+" body", v, content[media].(object)["schema"].(object))
		return
	}
	document := content["application/json"].(object)["schema"].(object)
	operations := document["properties"].(object)["operations"].(object)["items"].(object)["oneOf"].([]any)
	used := map[any]bool{}
	for line := range bytes.Lines(c.body) {
		var v object
		if err := json.Unmarshal(line, &v); err != nil {
			c.differs("%s: sends %s: %v", id, line, err)
			continue
		}
		for _, o := range operations {
			o := c.resolve(o.(object))
			names, _ := o["properties"].(object)["op"].(object)["enum"].([]any)
			if slices.Contains(names, v["op"]) {
				used[v["op"]] = true
				c.fits(id+" "+fmt.Sprint(v["op"]), v, o)
			}
		}
	}
	for _, o := range operations {
		for _, name := range c.resolve(o.(object))["properties"].(object)["op"].(object)["enum"].([]any) {
			if !used[name] {
				c.differs("%s: sends no operation %s", id, name)
			}
		}
	}
}

// fits reports where a value with every member differs from the schema.
func (c *conformance) fits(at string, v any, schema object) {
	schema = c.resolve(schema)
	if any, ok := schema["oneOf"].([]any); ok {
		schema = c.resolve(any[0].(object))
		if s, ok := v.(string); ok && s == "*" {
			return
		}
	}
	switch v := v.(type) {
	case object:
		properties, _ := schema["properties"].(object)
		if kindOf(schema) != "object" {
			c.differs("%s: is an object, the document has %s", at, kindOf(schema))
			return
		}
		for name, p := range properties {
			if _, ok := v[name]; !ok {
				c.differs("%s: has no %s", at, name)
				continue
			}
			c.fits(at+"."+name, v[name], p.(object))
		}
		for name := range v {
			if properties[name] == nil {
				c.differs("%s: the document has no %s", at, name)
			}
		}
	case []any:
		if kindOf(schema) != "array" {
			c.differs("%s: is a list, the document has %s", at, kindOf(schema))
			return
		}
		for _, item := range v {
			c.fits(at, item, schema["items"].(object))
		}
	case string:
		if kindOf(schema) != "string" || (isID(schema) || isNumber(schema)) != regexp.MustCompile(`^\d+$`).MatchString(v) {
			c.differs("%s: is the string %q, the document has %v", at, v, schema)
		}
	case float64:
		if kindOf(schema) != "integer" {
			c.differs("%s: is a number, the document has %s", at, kindOf(schema))
		}
	case bool:
		if kindOf(schema) != "boolean" {
			c.differs("%s: is a boolean, the document has %s", at, kindOf(schema))
		}
	}
}

// read compares the type that a method returns with the schema of the answer.
func (c *conformance) read(id string, t reflect.Type, schema object) {
	if schema == nil {
		c.differs("%s: returns %v, the document has no answer", id, t)
		return
	}
	schema = c.resolve(schema)
	properties, _ := schema["properties"].(object)
	switch {
	case strings.HasPrefix(t.Name(), "Outcome["): // it has a member of the kind
		entity, _ := t.FieldByName("Entity")
		outcome := map[string]string{"Line": "line", "Status": "status", "Replayed": "replayed", "Token": "token", "Problem": "problem"}
		_, name, _ := strings.Cut(id, "batch-")
		if name = strings.TrimSuffix(name, "s"); name == "comment-like" {
			name = "like_comment"
		}
		for _, member := range outcome {
			if properties[member] == nil {
				c.differs("%s: the document has no outcome's %s", id, member)
			}
		}
		if p, ok := properties[name].(object); !ok {
			c.differs("%s: the document has no outcome's %s", id, name)
		} else {
			c.same(id+" "+name, entity.Type, p, 0)
		}
		problem, _ := t.FieldByName("Problem")
		c.same(id+" problem", problem.Type, properties["problem"].(object), 0)
	case strings.HasPrefix(t.Name(), "Page["):
		for name := range properties {
			if !slices.ContainsFunc(fieldsOf(t), func(f field) bool { return f.name == name }) {
				c.differs("%s: a page has no %s", id, name)
			}
		}
		for _, f := range fieldsOf(t) {
			if p, ok := properties[f.name].(object); ok {
				c.same(id+"."+f.name, f.of, p, 0)
			} else if f.name == "items" || f.name == "next" {
				c.differs("%s: the document has no %s of a page", id, f.name)
			}
		}
	case t.Kind() == reflect.Slice: // the items of an answer with as_of
		for _, name := range slices.Sorted(maps.Keys(properties)) {
			if name != "items" && name != "as_of" {
				c.differs("%s: the result has no %s", id, name)
			}
		}
		if p, ok := properties["items"].(object); ok {
			c.same(id, t, p, 0)
		}
	default:
		c.same(id, t, schema, 0)
	}
}

// field returns a field of a struct, or of a struct that is embedded in it.
type field struct {
	name     string
	optional bool
	of       reflect.Type
}

func fieldsOf(t reflect.Type) (all []field) {
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && name == "":
			all = append(all, fieldsOf(f.Type)...)
		case name != "-" && f.IsExported():
			all = append(all, field{name, strings.Contains(options, "omitempty") || strings.Contains(options, "omitzero"), f.Type})
		}
	}
	return all
}

// same reports where a type differs from the schema.
func (c *conformance) same(at string, t reflect.Type, schema object, depth int) {
	schema = c.resolve(schema)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	kind := kindOf(schema)
	if depth > 8 { // a tree
		return
	}
	want := ""
	switch {
	case t == reflect.TypeFor[json.RawMessage]():
		return
	case t == reflect.TypeFor[client.ID]():
		if !isID(schema) && !isEnd(schema) {
			want = "an ID"
		}
	case t == reflect.TypeFor[time.Time]():
		if schema["format"] != "date-time" {
			want = "a time"
		}
	case t.Kind() == reflect.String:
		if kind != "string" || isID(schema) || schema["format"] == "date-time" {
			want = "a string"
		}
	case t.Kind() == reflect.Int || t.Kind() == reflect.Int64:
		if kind != "integer" && !isNumber(schema) {
			want = "an integer"
		}
	case t.Kind() == reflect.Uint64: // as a string
		if kind != "string" || isID(schema) {
			want = "a number in a string"
		}
	case t.Kind() == reflect.Bool:
		if kind != "boolean" {
			want = "a boolean"
		}
	case t.Kind() == reflect.Slice:
		if kind != "array" {
			want = "a list"
			break
		}
		c.same(at+"[]", t.Elem(), schema["items"].(object), depth+1)
	case t.Kind() == reflect.Map:
		value, ok := schema["additionalProperties"].(object)
		if !ok {
			want = "a map"
			break
		}
		c.same(at+"{}", t.Elem(), value, depth+1)
	case t.Kind() == reflect.Struct:
		c.sameStruct(at, t, schema, depth)
	default:
		want = t.String()
	}
	if want != "" {
		c.differs("%s: is %s, the document has %v", at, want, schema)
	}
}

func (c *conformance) sameStruct(at string, t reflect.Type, schema object, depth int) {
	properties, _ := schema["properties"].(object)
	required, _ := schema["required"].([]any)
	fields := fieldsOf(t)
	for name := range properties {
		if !slices.ContainsFunc(fields, func(f field) bool { return f.name == name }) {
			c.differs("%s: %v has no %s", at, t, name)
		}
	}
	for _, f := range fields {
		p, ok := properties[f.name].(object)
		switch {
		case !ok:
			c.differs("%s: the document has no %s", at, f.name)
		case f.optional == slices.Contains(required, any(f.name)):
			c.differs("%s.%s: is optional: %v, the document says the opposite", at, f.name, f.optional)
		default:
			c.same(at+"."+f.name, f.of, p, depth+1)
		}
	}
}

func (c *conformance) resolve(schema object) object {
	for {
		ref, ok := schema["$ref"].(string)
		if !ok {
			return schema
		}
		schema = c.doc["components"].(object)["schemas"].(object)[strings.TrimPrefix(ref, "#/components/schemas/")].(object)
	}
}

// kindOf returns the type of a schema, which may also allow null.
func kindOf(schema object) string {
	switch k := schema["type"].(type) {
	case string:
		return k
	case []any:
		return k[0].(string)
	}
	return "any"
}

func isNumber(schema object) bool {
	pattern, _ := schema["pattern"].(string)
	return strings.HasPrefix(pattern, "^[1-9]")
}

func isID(schema object) bool {
	pattern, _ := schema["pattern"].(string)
	return strings.HasPrefix(pattern, "^[A-Za-z0-9._~:@")
}

// isEnd reports whether the schema is that of a child's id at an end of an edge.
func isEnd(schema object) bool {
	pattern, _ := schema["pattern"].(string)
	return schema["format"] == "uuid" && strings.HasPrefix(pattern, "^[0-9a-f]{8}-(")
}

func list(v any) (all []object) {
	items, _ := v.([]any)
	for _, i := range items {
		all = append(all, i.(object))
	}
	return all
}

// TestTheClientIsTheDocuments verifies that every operation has a method, which sends the parts of
// the document's request and reads every member of its answer.
func TestTheClientIsTheDocuments(t *testing.T) {
	for _, d := range differences(t, document(t)) {
		t.Error(d)
	}
}

// TestDifferencesAreFound changes the document as a new API might, and expects a difference each
// time.
func TestDifferencesAreFound(t *testing.T) {
	raw, err := json.Marshal(document(t))
	if err != nil {
		t.Fatal(err)
	}
	schema := func(d object, name string) object {
		return d["components"].(object)["schemas"].(object)[name].(object)
	}
	properties := func(d object, name string) object { return schema(d, name)["properties"].(object) }
	operation := func(d object, path, verb string) object { return d["paths"].(object)[path].(object)[verb].(object) }
	const likers, like, comments = "/v1/posts/{post_id}/likers", "/v1/likes/{user_id}/{post_id}", "/v1/posts/{post_id}/comments"
	for what, change := range map[string]func(object){
		"an operation without a method": func(d object) {
			d["paths"].(object)["/v1/new"] = object{"get": object{"operationId": "get-new", "responses": object{}}}
		},
		"an operation that is gone": func(d object) { delete(d["paths"].(object)[like].(object), "put") },
		"another path": func(d object) {
			p := d["paths"].(object)
			p["/v1/hearts/{user_id}/{post_id}"] = p[like]
			delete(p, like)
		},
		"another method":               func(d object) { p := d["paths"].(object)[like].(object); p["post"] = p["put"]; delete(p, "put") },
		"a member more":                func(d object) { properties(d, "Like")["color"] = object{"type": "string"} },
		"a member less":                func(d object) { delete(properties(d, "Review"), "body") },
		"a member of a list's item":    func(d object) { properties(d, "MembershipOrigin")["since"] = object{"type": "string"} },
		"a member of a page":           func(d object) { properties(d, "LikeOrigins")["total"] = object{"type": "integer"} },
		"another type":                 func(d object) { properties(d, "Counts")["followers"] = object{"type": "string"} },
		"a number that becomes an id":  func(d object) { properties(d, "DeadMessage")["attempts"] = properties(d, "DeadMessage")["id"] },
		"a member that may be missing": func(d object) { schema(d, "Follow")["required"] = []any{"follower_id"} },
		"a member that is never missing": func(d object) {
			schema(d, "ThreadSettings")["required"] = append(schema(d, "ThreadSettings")["required"].([]any), "title")
		},
		"an attribute": func(d object) {
			properties(d, "Membership")["attributes"].(object)["properties"].(object)["since"] = object{"type": "integer"}
		},
		"a parameter of the query more": func(d object) {
			o := operation(d, likers, "get")
			o["parameters"] = append(o["parameters"].([]any), object{"name": "since", "in": "query"})
		},
		"a parameter of the query less": func(d object) {
			o := operation(d, "/v1/outbox/dlq", "get")
			o["parameters"] = o["parameters"].([]any)[1:]
		},
		"a read of a projection more": func(d object) {
			o := operation(d, like, "get")
			o["parameters"] = append(o["parameters"].([]any), object{"name": "Tidings-Token", "in": "header"})
		},
		"a guard more": func(d object) {
			o := operation(d, like, "delete")
			o["parameters"] = append(o["parameters"].([]any), object{"name": "If-Match", "in": "header"})
		},
		"no idempotency key":       func(d object) { o := operation(d, comments, "post"); o["parameters"] = []any{} },
		"a member of a body more":  func(d object) { properties(d, "CreateInputBody")["language"] = object{"type": "string"} },
		"a member of a body less":  func(d object) { delete(properties(d, "ReviewInput"), "author_id") },
		"another type of a body":   func(d object) { properties(d, "EditInputBody")["body"] = object{"type": "integer"} },
		"a member of an operation": func(d object) { properties(d, "LikeOperation")["color"] = object{"type": "string"} },
		"an operation of a batch": func(d object) {
			properties(d, "FollowOperation")["op"] = object{"type": "string", "enum": []any{"put", "remove", "mute"}}
		},
		"a member of a problem":          func(d object) { properties(d, "Problem")["trace"] = object{"type": "string"} },
		"a member of a version":          func(d object) { properties(d, "ShareVersion")["why"] = object{"type": "string"} },
		"a member of an export's state":  func(d object) { properties(d, "ExportState")["why"] = object{"type": "string"} },
		"a member of an export's stream": func(d object) { delete(properties(d, "ExportPosition"), "sequence") },
		"a member of a tree":             func(d object) { properties(d, "TreeComment")["collapsed"] = object{"type": "boolean"} },
	} {
		var doc object
		if err := json.Unmarshal(raw, &doc); err != nil {
			t.Fatal(err)
		}
		change(doc)
		if found := differences(t, doc); len(found) == 0 {
			t.Errorf("%s: nothing differs", what)
		}
	}
}

// TestCodesAreTheAPIs compares the constants with the table of the API's codes in docs/api.md.
func TestCodesAreTheAPIs(t *testing.T) {
	page, err := os.ReadFile("../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("errors.go")
	if err != nil {
		t.Fatal(err)
	}
	codes := func(text []byte, pattern string) (all []string) {
		for _, m := range regexp.MustCompile(pattern).FindAllSubmatch(text, -1) {
			all = append(all, string(m[1]))
		}
		return slices.Sorted(slices.Values(all))
	}
	documented, constants := codes(page, "(?m)^\\| `([a-z-]+)` \\| \\d{3} \\|"), codes(source, `(?m)^\tCode\w+\s+Code = "([a-z-]+)"$`)
	if len(documented) < 30 || !slices.Equal(documented, constants) {
		t.Errorf("the API has the codes %q, the client %q", documented, constants)
	}
}
