package client

import (
	"context"
	"net/http"
	"time"
)

// edgeKind is what the API says of a kind of edges.
type edgeKind struct {
	name, plural     string
	ends             [2]string // the members that name both ends
	from, to         string    // objects, which name the members of lists
	fromPath, toPath string    // their plurals
	forward, reverse string    // lists
	names            names     // of a kind that the package has no types of
	self             bool      // the kind's ends are objects of one sort
}

// words are the operations of a batch. Follows had theirs before there were kinds.
func (k edgeKind) words() (put, remove string) {
	if k.name == followKind.name {
		return "follow", "unfollow"
	}
	return "put", "remove"
}

func (k edgeKind) path(from, to ID) string {
	return "/v1/" + k.plural + "/" + from.String() + "/" + to.String()
}

// The built-in kinds of edges.
var (
	followKind = edgeKind{name: "follow", plural: "follows", ends: [2]string{"follower_id", "followee_id"}, from: "user", to: "user", fromPath: "users", toPath: "users", forward: "following", reverse: "followers", self: true}
	likeKind   = edgeKind{name: "like", plural: "likes", ends: [2]string{"user_id", "post_id"}, from: "user", to: "post", fromPath: "users", toPath: "posts", forward: "likes", reverse: "likers"}
	shareKind  = edgeKind{name: "share", plural: "shares", ends: [2]string{"user_id", "post_id"}, from: "user", to: "post", fromPath: "users", toPath: "posts", forward: "shares", reverse: "sharers"}

	membershipKind = edgeKind{name: "membership", plural: "memberships", ends: [2]string{"user_id", "group_id"}, from: "user", to: "group", fromPath: "users", toPath: "groups", forward: "groups", reverse: "members"}
)

// EdgeState is what every edge has beside its ends.
type EdgeState struct {
	Status       string    `json:"status"`        // ACTIVE; of a past version also REMOVED
	Version      int64     `json:"version"`       // rises by one with each change
	CreatedAt    time.Time `json:"created_at"`    // when there first was one
	PositionedAt time.Time `json:"positioned_at"` // when it last became active: its place in lists
	UpdatedAt    time.Time `json:"updated_at"`
}

// Follow says that one user follows another.
type Follow struct {
	FollowerID ID `json:"follower_id"`
	FolloweeID ID `json:"followee_id"`
	EdgeState
}

// Like says that a user likes a post.
type Like struct {
	UserID ID `json:"user_id"`
	PostID ID `json:"post_id"`
	EdgeState
}

// Share says that a user shared a post.
type Share struct {
	UserID ID `json:"user_id"`
	PostID ID `json:"post_id"`
	EdgeState
}

// Membership says that a user is in a group.
type Membership struct {
	UserID  ID `json:"user_id"`
	GroupID ID `json:"group_id"`
	EdgeState
	Attributes MembershipAttributes `json:"attributes"`
}

// MembershipAttributes are what a membership says.
type MembershipAttributes struct {
	Role string `json:"role"` // member, moderator or owner
}

// MembershipChanges are what a write says of a membership.
type MembershipChanges struct {
	Role string `json:"role,omitempty"` // member, moderator or owner; "" is the default in PutWith, and no change in Patch
}

// Edge is one of any kind.
type Edge struct {
	From ID `json:"from_id"`
	To   ID `json:"to_id"`
	EdgeState
	Attributes map[string]any `json:"attributes,omitempty"`
}

// VersionedEdge is an edge with attributes: its ends, and the version that a change of it is about.
type VersionedEdge interface {
	Ends() (from, to ID, version int64)
}

// Ends implements VersionedEdge.
func (m Membership) Ends() (from, to ID, version int64) { return m.UserID, m.GroupID, m.Version }

// Ends implements VersionedEdge.
func (e Edge) Ends() (from, to ID, version int64) { return e.From, e.To, e.Version }

// VersionInfo says of a version who made it and when.
type VersionInfo struct {
	Version      int64     `json:"version"`         // of the object
	VersionID    ID        `json:"version_id"`      // of this record
	VersionState string    `json:"version_state"`   // LATEST, ARCHIVED when a later one follows, or DELETED
	Actor        string    `json:"actor,omitempty"` // "" where the author is hidden
	At           time.Time `json:"at"`
}

// FollowVersion is a follow as it was.
type FollowVersion struct {
	VersionInfo
	Follow Follow `json:"follow"`
}

// LikeVersion is a like as it was.
type LikeVersion struct {
	VersionInfo
	Like Like `json:"like"`
}

// ShareVersion is a share as it was.
type ShareVersion struct {
	VersionInfo
	Share Share `json:"share"`
}

// MembershipVersion is a membership as it was.
type MembershipVersion struct {
	VersionInfo
	Membership Membership `json:"membership"`
}

// EdgeVersion is an edge of any kind as it was.
type EdgeVersion struct {
	VersionInfo
	Edge Edge `json:"edge"`
}

// FollowRelation says how two users stand to each other.
type FollowRelation struct {
	FollowerID   ID        `json:"follower_id"`
	FolloweeID   ID        `json:"followee_id"`
	Following    bool      `json:"following"`              // the first follows the second
	FollowedBy   bool      `json:"followed_by"`            // the second follows the first
	PositionedAt time.Time `json:"positioned_at,omitzero"` // when Following last became true
}

// LikeRelation says whether a user likes a post.
type LikeRelation struct {
	UserID       ID        `json:"user_id"`
	PostID       ID        `json:"post_id"`
	Active       bool      `json:"active"`
	PositionedAt time.Time `json:"positioned_at,omitzero"` // when Active last became true
}

// ShareRelation says whether a user shared a post.
type ShareRelation struct {
	UserID       ID        `json:"user_id"`
	PostID       ID        `json:"post_id"`
	Active       bool      `json:"active"`
	PositionedAt time.Time `json:"positioned_at,omitzero"` // when Active last became true
}

// MembershipRelation says whether a user is in a group.
type MembershipRelation struct {
	UserID       ID        `json:"user_id"`
	GroupID      ID        `json:"group_id"`
	Active       bool      `json:"active"`
	PositionedAt time.Time `json:"positioned_at,omitzero"` // when Active last became true
}

// Relation says whether there is an edge of any kind.
type Relation struct {
	From         ID        `json:"from_id"`
	To           ID        `json:"to_id"`
	Active       bool      `json:"active"`
	Reversed     bool      `json:"reversed,omitempty"`     // there is one from To to From, of a kind whose ends are of one sort
	PositionedAt time.Time `json:"positioned_at,omitzero"` // when Active last became true
}

// UserEntry is a user in a list of edges.
type UserEntry struct {
	UserID       ID        `json:"user_id"`
	PositionedAt time.Time `json:"positioned_at"` // the list's order, newest first
}

// PostEntry is a post in a list of edges.
type PostEntry struct {
	PostID       ID        `json:"post_id"`
	PositionedAt time.Time `json:"positioned_at"` // the list's order, newest first
}

// MemberEntry is a user in the list of a group's members.
type MemberEntry struct {
	UserID       ID                   `json:"user_id"`
	PositionedAt time.Time            `json:"positioned_at"` // the list's order, newest first
	Attributes   MembershipAttributes `json:"attributes"`
}

// GroupEntry is a group in the list of a user's groups.
type GroupEntry struct {
	GroupID      ID                   `json:"group_id"`
	PositionedAt time.Time            `json:"positioned_at"` // the list's order, newest first
	Attributes   MembershipAttributes `json:"attributes"`
}

// Entry is an object in a list of edges of any kind.
type Entry struct {
	Object       ID             `json:"object_id"`
	PositionedAt time.Time      `json:"positioned_at"` // the list's order, newest first
	Attributes   map[string]any `json:"attributes,omitempty"`
}

// Edges are the operations on a kind of edges E, whose Check answers R and whose histories have V.
type Edges[E, R, V any] struct {
	core *core
	kind func(context.Context) (edgeKind, error)
}

func edges[E, R, V any](c *core, k edgeKind) Edges[E, R, V] {
	return Edges[E, R, V]{c, func(context.Context) (edgeKind, error) { return k, nil }}
}

// Put makes an edge. Response.Status is 201 when there was none and 200 when there was. An edge that is there keeps its attributes, a new one gets the defaults.
func (e Edges[E, R, V]) Put(ctx context.Context, from, to ID, opts ...Option) (E, error) {
	return e.send(ctx, http.MethodPut, from, to, nil, opts)
}

func (e Edges[E, R, V]) send(ctx context.Context, method string, from, to ID, body any, opts []Option, change ...func(*call)) (E, error) {
	kind, err := e.kind(ctx)
	if err != nil {
		var none E
		return none, err
	}
	k := newCall(method, kind.path(from, to), opts)
	if body != nil {
		k.json(body)
	}
	for _, f := range change {
		f(k)
	}
	return fetch[E](ctx, e.core, k, kind.names)
}

// Get reads an edge from the truth. IsNotFound reports that there is none.
func (e Edges[E, R, V]) Get(ctx context.Context, from, to ID, opts ...Option) (E, error) {
	return e.send(ctx, http.MethodGet, from, to, nil, opts)
}

// Remove takes an edge away. It succeeds where there is none.
func (e Edges[E, R, V]) Remove(ctx context.Context, from, to ID, opts ...Option) error {
	kind, err := e.kind(ctx)
	if err != nil {
		return err
	}
	_, _, err = e.core.do(ctx, newCall(http.MethodDelete, kind.path(from, to), opts))
	return err
}

// Versions lists the versions of an edge, newest first. They are a record: they do not wait for a session's writes.
func (e Edges[E, R, V]) Versions(from, to ID, opts ...Option) *List[V] {
	return lazily[V](e.core, func(ctx context.Context) (string, names, error) {
		kind, err := e.kind(ctx)
		return kind.path(from, to) + "/versions", kind.names, err
	}, false, opts)
}

// Pair names an edge by its ends.
type Pair struct{ From, To ID }

// Check asks of up to 500 pairs whether there is an edge, and answers in their order.
func (e Edges[E, R, V]) Check(ctx context.Context, pairs []Pair, opts ...Option) ([]R, error) {
	kind, err := e.kind(ctx)
	if err != nil {
		return nil, err
	}
	body := struct {
		Pairs []map[string]ID `json:"pairs"`
	}{make([]map[string]ID, len(pairs))}
	for i, p := range pairs {
		body.Pairs[i] = map[string]ID{kind.ends[0]: p.From, kind.ends[1]: p.To}
	}
	k := newCall(http.MethodPost, "/v1/"+kind.plural+":check", opts).json(body).projected().repeatable()
	all, err := fetch[several[R]](ctx, e.core, k, kind.names)
	return all.Items, err
}

// several is a list that comes whole.
type several[T any] struct {
	Items []T       `json:"items"`
	AsOf  time.Time `json:"as_of"`
}

func (s *several[T]) asOf() time.Time { return s.AsOf }

func (e Edges[E, R, V]) forward(of ID) func(context.Context) (string, names, error) {
	return func(ctx context.Context) (string, names, error) {
		k, err := e.kind(ctx)
		return "/v1/" + k.fromPath + "/" + of.String() + "/" + k.forward, k.listNames(k.to), err
	}
}

func (e Edges[E, R, V]) reverse(of ID) func(context.Context) (string, names, error) {
	return func(ctx context.Context) (string, names, error) {
		k, err := e.kind(ctx)
		return "/v1/" + k.toPath + "/" + of.String() + "/" + k.reverse, k.listNames(k.from), err
	}
}

func (k edgeKind) listNames(object string) names {
	if k.names == nil {
		return nil
	}
	return names{object + "_id": "object_id"}
}

// AttributedEdges are the operations on a kind of edges with attributes A.
type AttributedEdges[E VersionedEdge, R, V, A any] struct{ Edges[E, R, V] }

// PutWith makes an edge with these attributes, all of them: those that it leaves out get their defaults.
func (e AttributedEdges[E, R, V, A]) PutWith(ctx context.Context, from, to ID, attributes A, opts ...Option) (E, error) {
	return e.send(ctx, http.MethodPut, from, to, attributes, opts)
}

// Patch changes those attributes that changes has, of an edge that has not changed since: If-Match is its version.
func (e AttributedEdges[E, R, V, A]) Patch(ctx context.Context, edge E, changes A, opts ...Option) (E, error) {
	from, to, version := edge.Ends()
	return e.send(ctx, http.MethodPatch, from, to, changes, opts, func(k *call) { k.matching(version) })
}

// Follows are the operations on follows.
type Follows struct {
	Edges[Follow, FollowRelation, FollowVersion]
}

// Followers lists who follows a user, newest first.
func (f Follows) Followers(user ID, opts ...Option) *List[UserEntry] {
	return lazily[UserEntry](f.core, f.reverse(user), true, opts)
}

// Following lists whom a user follows, newest first.
func (f Follows) Following(user ID, opts ...Option) *List[UserEntry] {
	return lazily[UserEntry](f.core, f.forward(user), true, opts)
}

// Likes are the operations on likes.
type Likes struct {
	Edges[Like, LikeRelation, LikeVersion]
}

// Likers lists who likes a post, newest first.
func (l Likes) Likers(post ID, opts ...Option) *List[UserEntry] {
	return lazily[UserEntry](l.core, l.reverse(post), true, opts)
}

// ByUser lists what a user likes, newest first.
func (l Likes) ByUser(user ID, opts ...Option) *List[PostEntry] {
	return lazily[PostEntry](l.core, l.forward(user), true, opts)
}

// Shares are the operations on shares.
type Shares struct {
	Edges[Share, ShareRelation, ShareVersion]
}

// Sharers lists who shared a post, newest first.
func (s Shares) Sharers(post ID, opts ...Option) *List[UserEntry] {
	return lazily[UserEntry](s.core, s.reverse(post), true, opts)
}

// ByUser lists what a user shared, newest first.
func (s Shares) ByUser(user ID, opts ...Option) *List[PostEntry] {
	return lazily[PostEntry](s.core, s.forward(user), true, opts)
}

// Memberships are the operations on memberships.
type Memberships struct {
	AttributedEdges[Membership, MembershipRelation, MembershipVersion, MembershipChanges]
}

// Members lists who is in a group, newest first. Role keeps those with one role.
func (m Memberships) Members(group ID, opts ...Option) *List[MemberEntry] {
	return lazily[MemberEntry](m.core, m.reverse(group), true, opts)
}

// Groups lists the groups of a user, newest first.
func (m Memberships) Groups(user ID, opts ...Option) *List[GroupEntry] {
	return lazily[GroupEntry](m.core, m.forward(user), true, opts)
}

// AnyEdges are the operations on a kind of edges by its name.
type AnyEdges struct {
	AttributedEdges[Edge, Relation, EdgeVersion, map[string]any]
}

// Edges returns the operations on the kind of edges of this name. It sends nothing: the first operation asks the API how the kind's members are called, and
// returns an *UnknownKindError where the API has no such kind.
func (c *Client) Edges(kind string) AnyEdges {
	return AnyEdges{AttributedEdges[Edge, Relation, EdgeVersion, map[string]any]{Edges[Edge, Relation, EdgeVersion]{c.core, func(ctx context.Context) (edgeKind, error) {
		var k edgeKind
		list, err := c.core.kindsOf(ctx, func(l *KindList) bool { return l.edge(kind, &k) })
		if err != nil {
			return k, err
		}
		if k.name == "" {
			return k, &UnknownKindError{kind, list.edgeNames()}
		}
		k.names = names{k.ends[0]: "from_id", k.ends[1]: "to_id", k.name: "edge"}
		if k.name == followKind.name {
			k.names["following"], k.names["followed_by"] = "active", "reversed"
		}
		return k, nil
	}}}}
}

// Forward lists the edges that lead from an object, newest first.
func (a AnyEdges) Forward(of ID, opts ...Option) *List[Entry] {
	return lazily[Entry](a.core, a.forward(of), true, opts)
}

// Reverse lists the edges that lead to an object, newest first. Filter keeps those with one value of an attribute.
func (a AnyEdges) Reverse(of ID, opts ...Option) *List[Entry] {
	return lazily[Entry](a.core, a.reverse(of), true, opts)
}

// edge finds a kind of edges.
func (l *KindList) edge(name string, k *edgeKind) bool {
	for _, e := range l.Edges {
		if e.Name == name && len(e.Ends) == 2 {
			*k = edgeKind{name: e.Name, plural: e.Plural, ends: [2]string(e.Ends), from: e.From, to: e.To, fromPath: l.plural(e.From), toPath: l.plural(e.To),
				forward: e.Forward, reverse: e.Reverse, self: e.From == e.To}
			return true
		}
	}
	return false
}

func (l *KindList) edgeNames() (all []string) {
	for _, e := range l.Edges {
		all = append(all, e.Name)
	}
	return all
}

// plural is an object's, as it is in paths.
func (l *KindList) plural(object string) string {
	for _, o := range l.Objects {
		if o.Name == object {
			return o.Plural
		}
	}
	return object + "s"
}
