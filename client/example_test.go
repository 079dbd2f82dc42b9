package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"slices"
	"testing"

	"github.com/tidings/tidings/client"
	"github.com/tidings/tidings/client/clienttest"
)

// example plays the test in examples, which have none.
type example struct{ testing.TB }

func (example) Helper()                           {}
func (example) Cleanup(func())                    {}
func (example) Fatalf(format string, args ...any) { log.Fatalf(format, args...) }
func (example) Fatal(args ...any)                 { log.Fatal(args...) }

// newTenant makes a tenant for an example, on an API that runs for the examples.
func newTenant() (url, token string) {
	tenant := clienttest.NewTenant(example{})
	return tenant.URL, tenant.Token(example{})
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func Example() {
	url, token := newTenant()
	ctx := context.Background()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	s := c.Session() // its reads include its writes

	follow, err := s.Follows.Put(ctx, "7", "42")
	must(err)
	fmt.Println(follow.FollowerID, "follows", follow.FolloweeID)

	comment, err := s.Comments.Create(ctx, "100", client.NewComment{AuthorID: "7", Body: "Hello"})
	must(err)
	comment, err = s.Comments.Edit(ctx, comment, client.CommentEdit{Body: "Hello, world"})
	must(err)
	fmt.Println(comment.Version, comment.Body)

	for follower, err := range s.Follows.Followers("42").All(ctx) {
		must(err)
		fmt.Println("follower", follower.UserID)
	}
	counts, err := s.Posts.Counts(ctx, "100")
	must(err)
	fmt.Println(counts.Comments.Visible, "comment")
	// Output:
	// 7 follows 42
	// 2 Hello, world
	// follower 7
	// 1 comment
}

// A list that was left early is resumed from its cursor.
func ExampleList_Cursor() {
	url, token := newTenant()
	ctx := context.Background()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	s := c.Session()
	for user := range 5 {
		_, err := s.Likes.Put(ctx, client.IDOf(user+1), "42")
		must(err)
	}
	likers := s.Likes.Likers("42", client.PageSize(2))
	n := 0
	for _, err := range likers.All(ctx) {
		must(err)
		if n++; n == 3 { // the first item of the second page
			break
		}
	}
	for liker, err := range s.Likes.Likers("42", client.PageSize(2), client.Cursor(likers.Cursor())).All(ctx) {
		must(err)
		fmt.Println(liker.UserID)
	}
	// Output:
	// 3
	// 2
	// 1
}

// A feed shows the counts of its posts, and which of them its viewer likes.
func ExamplePosts_Check() {
	url, token := newTenant()
	ctx := context.Background()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	s := c.Session()
	_, err = s.Likes.Put(ctx, "7", "100")
	must(err)
	feed := []client.ID{"100", "101"}
	counts, err := s.Posts.CountsOf(ctx, feed)
	must(err)
	checks, err := s.Posts.Check(ctx, "7", feed, nil)
	must(err)
	for i, post := range feed {
		fmt.Println(post, counts[i].Counts.Likers, checks[i].Edges.Like.Active, checks[i].Edges.Share.Active)
	}
	// Output:
	// 100 1 true false
	// 101 0 false false
}

func ExampleEdges_Batch() {
	url, token := newTenant()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	ops := []client.Operation[client.Follow]{c.Follows.PutOp("7", "42"), c.Follows.PutOp("7", "7"), c.Follows.RemoveOp("7", "42")}
	for outcome, err := range c.Follows.Batch(context.Background(), slices.Values(ops)) {
		must(err)
		if err := outcome.Err(); err != nil {
			fmt.Println(outcome.Index, outcome.Problem.Code)
			continue
		}
		fmt.Println(outcome.Index, outcome.Status)
	}
	// Output:
	// 0 201
	// 1 self-follow
	// 2 204
}

func ExampleProblem() {
	url, token := newTenant()
	ctx := context.Background()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	_, err = c.Likes.Get(ctx, "7", "42")
	fmt.Println(client.IsNotFound(err))
	_, err = c.Reviews.Create(ctx, "9", client.NewReview{AuthorID: "7", Body: "Good", Attributes: client.ReviewAttributes{Rating: 6}})
	if p := new(client.Problem); errors.As(err, &p) {
		fmt.Println(p.Code, p.Errors[0].Pointer)
	}
	// Output:
	// true
	// validation-failed #/attributes/rating
}

// A kind that the installation added is used by its name.
func ExampleClient_Edges() {
	clienttest.ApplyKinds(example{}, `
objects: {user: users, place: places}
edges:
  visit: {plural: visits, from: user, to: place, forward: visits, reverse: visitors, attributes: {how: {enum: [car, train], default: car}}}
`)
	url, token := newTenant()
	ctx := context.Background()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	visit, err := c.Edges("visit").PutWith(ctx, "7", "5", map[string]any{"how": "train"})
	must(err)
	fmt.Println(visit.From, visit.To, visit.Attributes["how"])
	_, err = c.Edges("wave").Put(ctx, "7", "8")
	var unknown *client.UnknownKindError
	fmt.Println(errors.As(err, &unknown), unknown.Kind)
	// Output:
	// 7 5 train
	// true wave
}

// Use a transport for traces, metrics and TLS, for example
// otelhttp.NewTransport(http.DefaultTransport).
func ExampleWithHTTPClient() {
	url, token := newTenant()
	var spans []string
	transport := observed{http.DefaultTransport, func(r *http.Request, status int) {
		spans = append(spans, fmt.Sprint(r.Method, " ", r.URL.Path, " ", status))
	}}
	c, err := client.New(url, client.WithToken(token), client.WithHTTPClient(&http.Client{Transport: transport}))
	must(err)
	defer c.Close()
	var meta client.Response
	_, err = c.Follows.Put(context.Background(), "7", "42", client.WithResponse(&meta))
	must(err)
	fmt.Println(spans, meta.Attempts, meta.RequestID != "")
	// Output:
	// [PUT /v1/follows/7/42 201] 1 true
}

// observed reports each request.
type observed struct {
	http.RoundTripper
	tell func(r *http.Request, status int)
}

func (o observed) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := o.RoundTripper.RoundTrip(r)
	if err == nil {
		o.tell(r, resp.StatusCode)
	}
	return resp, err
}
