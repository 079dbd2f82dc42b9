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

func ExampleNew() {
	url, token := newTenant()
	c, err := client.New(url, client.WithToken(token), client.WithActor("shop"), client.WithRetry(client.DefaultRetry()))
	must(err)
	defer c.Close()
	_, err = client.New("tidings.example", client.WithToken(token))
	fmt.Println(err)
	_, err = new(client.Client).Kinds(context.Background())
	fmt.Println(err)
	// Output:
	// tidings: "tidings.example" is not an API's address: want http://HOST:PORT or https://HOST
	// tidings: the client is a zero value: make it with client.New
}

// A session continues in the process that answers the user's next request.
func ExampleClient_Session() {
	url, token := newTenant()
	ctx := context.Background()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	s := c.Session()
	_, err = s.Follows.Put(ctx, "7", "42")
	must(err)
	counts, err := c.Session(s.Token()).Users.Counts(ctx, "42")
	must(err)
	fmt.Println(counts.Followers)
	// Output: 1
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

const ownKinds = `
objects: {user: users, place: places}
edges:
  visit: {plural: visits, from: user, to: place, forward: visits, reverse: visitors, attributes: {how: {enum: [car, train], default: car}}}
children:
  tip: {plural: tips, parent: place, attributes: {stars: {type: integer}}}
`

// A kind that the installation added is used by its name.
func ExampleClient_Edges() {
	clienttest.ApplyKinds(example{}, ownKinds)
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

// How is the type of a visit's attributes.
type How struct {
	How string `json:"how,omitempty"`
}

// Attributes of a kind of your own have a type of yours.
func ExampleEdgesOf() {
	clienttest.ApplyKinds(example{}, ownKinds)
	url, token := newTenant()
	ctx := context.Background()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	s := c.Session()
	visits := client.EdgesOf[How](s, "visit")
	visit, err := visits.PutWith(ctx, "7", "5", How{How: "train"})
	must(err)
	visit, err = visits.Patch(ctx, visit, How{How: "car"})
	must(err)
	fmt.Println(visit.From, visit.To, visit.Attributes.How)
	for visitor, err := range visits.Reverse("5").All(ctx) {
		must(err)
		fmt.Println("visitor", visitor.Object, visitor.Attributes.How)
	}
	// Output:
	// 7 5 car
	// visitor 7 car
}

// Stars is the type of a tip's attributes.
type Stars struct {
	Stars int `json:"stars,omitempty"`
}

func ExampleChildrenOf() {
	clienttest.ApplyKinds(example{}, ownKinds)
	url, token := newTenant()
	ctx := context.Background()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	tips := client.ChildrenOf[Stars](c, "tip")
	tip, err := tips.Create(ctx, "5", client.NewChildOf[Stars]{AuthorID: "7", Body: "Go early.", Attributes: Stars{4}})
	must(err)
	tip, err = tips.Edit(ctx, tip, client.ChildEditOf[Stars]{Body: "Go late."})
	must(err)
	fmt.Println(tip.Body, tip.Attributes.Stars)
	// Output: Go late. 4
}

func ExampleClient_Children() {
	clienttest.ApplyKinds(example{}, ownKinds)
	url, token := newTenant()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	tip, err := c.Children("tip").Create(context.Background(), "5",
		client.NewChild{AuthorID: "7", Body: "Go early.", Attributes: map[string]any{"stars": 5}})
	must(err)
	fmt.Println(tip.Object, tip.Body, tip.Attributes["stars"])
	// Output: 5 Go early. 5
}

func ExampleClient_Objects() {
	clienttest.ApplyKinds(example{}, ownKinds)
	url, token := newTenant()
	ctx := context.Background()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	s := c.Session()
	_, err = s.Edges("visit").Put(ctx, "7", "5")
	must(err)
	counts, err := s.Objects("place").Counts(ctx, "5")
	must(err)
	fmt.Println(counts.Edges["visitors"])
	// Output: 1
}

func ExampleClient_Kinds() {
	url, token := newTenant()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	list, err := c.Kinds(context.Background())
	must(err)
	for _, k := range list.Edges {
		if k.Name == "follow" {
			fmt.Println(k.Plural, k.From, k.To)
		}
	}
	// Output: follows user user
}

// Call sends a request that no method covers.
func ExampleClient_Call() {
	url, token := newTenant()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	var follow client.Follow
	must(c.Call(context.Background(), http.MethodPut, "/v1/follows/7/42", nil, &follow))
	fmt.Println(follow.FollowerID, follow.FolloweeID)
	// Output: 7 42
}

func ExampleExport() {
	url, token := newTenant()
	ctx := context.Background()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	_, err = c.Follows.Put(ctx, "7", "42")
	must(err)
	for state, err := range c.Follows.Export().All(ctx) {
		must(err)
		fmt.Println(state.Type, state.Subject)
	}
	// Output: tidings.follow.created.v1 42
}

func ExampleDLQ() {
	url, token := newTenant()
	ctx := context.Background()
	c, err := client.New(url, client.WithToken(token))
	must(err)
	defer c.Close()
	for dead, err := range c.DLQ.List(client.DLQFilter{}).All(ctx) {
		must(err)
		_, err = c.DLQ.Retry(ctx, dead.ID, "the relay is fixed")
		must(err)
	}
	// Output:
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
