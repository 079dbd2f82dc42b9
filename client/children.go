package client

import (
	"context"
	"net/http"
	"net/url"
	"time"
)

// childKind is the API's description of a kind of children.
type childKind struct {
	name, plural       string
	parent, parentPath string // the parent object, and its plural
	names              names  // of a kind without types in this package
}

// under is the path of an object's children; one is the path of a child.
func (k childKind) under(object ID) string {
	return "/v1/" + k.parentPath + "/" + segment(object) + "/" + k.plural
}

func (k childKind) one(id string) string { return "/v1/" + k.plural + "/" + url.PathEscape(id) }

func (k childKind) summary(object ID) string { return k.under(object) + "/summary" }

// The routes of comments are older than kinds, so some have other paths.

func (k childKind) settings(object ID) string {
	if k.name == commentKind.name {
		return "/v1/posts/" + segment(object) + "/thread"
	}
	return k.under(object) + "/settings"
}

func (k childKind) pending() string {
	if k.name == commentKind.name {
		return "/v1/moderation/pending"
	}
	return "/v1/moderation/" + k.plural + "/pending"
}

// ChildState has the members that every child has beside its place and its content.
type ChildState struct {
	State     string    `json:"state"`   // VISIBLE, PENDING, HIDDEN, REMOVED, DELETED or ERASED
	Version   int64     `json:"version"` // rises by one with each change
	CreatedAt time.Time `json:"created_at"`
	UpdatedAt time.Time `json:"updated_at"`
}

// ChildOf is a child of any kind, with attributes A. A child that is gone has neither author, body
// nor attributes.
type ChildOf[A any] struct {
	ID       string `json:"child_id"`
	Object   ID     `json:"object_id"`
	ParentID string `json:"parent_id,omitempty"` // the child that it replies to
	AuthorID ID     `json:"author_id,omitempty"`
	Slug     string `json:"slug,omitempty"`
	Depth    int    `json:"depth,omitempty"`
	Body     string `json:"body,omitempty"`
	ChildState
	Attributes A `json:"attributes,omitempty"`
}

// Child is a child of any kind.
type Child = ChildOf[map[string]any]

// Versioned is a child. Ref returns its id, and the version on which a change of it is conditional.
type Versioned interface {
	Ref() (id string, version int64)
}

// Ref implements Versioned.
func (c ChildOf[A]) Ref() (id string, version int64) { return c.ID, c.Version }

// NewChildOf is a child of any kind to write, with attributes A.
type NewChildOf[A any] struct {
	AuthorID   ID     `json:"author_id"`
	Body       string `json:"body"`                // 1 to 16,384 bytes after trimming
	ParentID   string `json:"parent_id,omitempty"` // the child that it replies to, if the kind is threaded
	Attributes A      `json:"attributes,omitempty,omitzero"`
}

// NewChild is a child of any kind to write.
type NewChild = NewChildOf[map[string]any]

func (n NewChildOf[A]) replyTo() string { return n.ParentID }

// ChildEditOf has the changes of a child of any kind, with attributes A.
type ChildEditOf[A any] struct {
	Body       string `json:"body,omitempty"`                // "" for no change
	Attributes A      `json:"attributes,omitempty,omitzero"` // null as a member removes an attribute, or restores its default
}

// ChildEdit has the changes of a child of any kind.
type ChildEdit = ChildEditOf[map[string]any]

// ChildVersionOf is a child of any kind at one version.
type ChildVersionOf[A any] struct {
	VersionInfo
	Child  ChildOf[A] `json:"child"`
	Reason string     `json:"reason,omitempty"`
}

// ChildVersion is a child of any kind at one version.
type ChildVersion = ChildVersionOf[map[string]any]

// Children has the operations on a kind of children. C is a child, N a new one, D an edit and V a
// version of its history.
type Children[C Versioned, N, D, V any] struct {
	core *core
	find func(context.Context) (childKind, error)
}

func (c Children[C, N, D, V]) kind(ctx context.Context) (childKind, error) {
	if c.find == nil {
		return childKind{}, ErrNoClient
	}
	return c.find(ctx)
}

func children[C Versioned, N, D, V any](c *core, k childKind) Children[C, N, D, V] {
	return Children[C, N, D, V]{c, func(context.Context) (childKind, error) { return k, nil }}
}

// ask sends a call for the kind.
func ask[T any, C Versioned, N, D, V any](ctx context.Context, c Children[C, N, D, V], of func(childKind) *call) (T, error) {
	kind, err := c.kind(ctx)
	if err != nil {
		var none T
		return none, err
	}
	return fetch[T](ctx, c.core, of(kind).named(kind.names))
}

// RemoveEdges requests the removal of the edges to a child, of a kind to which edges lead. The
// removal runs in the background: Client.EdgeRemoval reads its progress. A repeated request is
// safe.
func (c Children[C, N, D, V]) RemoveEdges(ctx context.Context, id string, which EdgesToRemove, opts ...Option) (EdgeRemoval, error) {
	return ask[EdgeRemoval](ctx, c, func(k childKind) *call {
		return newCall(http.MethodPost, k.one(id)+":remove-edges", opts).json(which).repeatable()
	})
}

// where returns a function that finds the path of a list of the kind.
func (c Children[C, N, D, V]) where(path func(childKind) string) func(context.Context) (string, names, error) {
	return func(ctx context.Context) (string, names, error) {
		kind, err := c.kind(ctx)
		return path(kind), kind.names, err
	}
}

// Create creates a child under an object. All attempts have the same Idempotency-Key, so they
// create one child.
func (c Children[C, N, D, V]) Create(ctx context.Context, object ID, child N, opts ...Option) (C, error) {
	return ask[C](ctx, c, func(k childKind) *call {
		return newCall(http.MethodPost, k.under(object), opts).json(child).keyed()
	})
}

// Get reads a child from the truth. If it does not exist, IsNotFound reports true for the error.
func (c Children[C, N, D, V]) Get(ctx context.Context, id string, opts ...Option) (C, error) {
	return ask[C](ctx, c, func(k childKind) *call { return newCall(http.MethodGet, k.one(id), opts) })
}

// Edit edits a child on the condition that its version is still child's (If-Match). If it is not,
// IsStale reports true for the error.
func (c Children[C, N, D, V]) Edit(ctx context.Context, child C, edit D, opts ...Option) (C, error) {
	id, version := child.Ref()
	return ask[C](ctx, c, func(k childKind) *call {
		return newCall(http.MethodPatch, k.one(id), opts).json(edit).matching(version)
	})
}

// Delete deletes a child for its author, on the condition that its version is still child's
// (If-Match). It cannot be undone.
func (c Children[C, N, D, V]) Delete(ctx context.Context, child C, opts ...Option) error {
	kind, err := c.kind(ctx)
	if err != nil {
		return err
	}
	id, version := child.Ref()
	_, _, err = c.core.do(ctx, newCall(http.MethodDelete, kind.one(id), opts).matching(version).named(kind.names))
	return err
}

// List lists the children of an object. The options Order, Skip and Around choose the order and the
// beginning.
func (c Children[C, N, D, V]) List(object ID, opts ...Option) *List[C] {
	return lazily[C](c.core, c.where(func(k childKind) string { return k.under(object) }), true, opts)
}

// ByUser lists the visible children of a user, newest first.
func (c Children[C, N, D, V]) ByUser(user ID, opts ...Option) *List[C] {
	return lazily[C](c.core, c.where(func(k childKind) string { return "/v1/users/" + segment(user) + "/" + k.plural }), true, opts)
}

// Versions lists the versions of a child, newest first. They come from the recorded history, which
// does not wait for a session's writes.
func (c Children[C, N, D, V]) Versions(id string, opts ...Option) *List[V] {
	return lazily[V](c.core, c.where(func(k childKind) string { return k.one(id) + "/versions" }), false, opts)
}

// ThreadState has the settings for the children of an object.
type ThreadState struct {
	Locked       bool   `json:"locked"`       // no new children
	Premoderated bool   `json:"premoderated"` // new children are pending until a moderator approves them
	Title        string `json:"title,omitempty"`
	Version      int64  `json:"version"` // 0 before the first change
}

// ThreadSettings are the settings for the comments of a post.
type ThreadSettings struct {
	PostID ID `json:"post_id"`
	ThreadState
	UpdatedAt time.Time `json:"updated_at,omitzero"`
}

// ChildSettings are the settings for the children of an object of any kind.
type ChildSettings struct {
	Object ID `json:"object_id"`
	ThreadState
	UpdatedAt time.Time `json:"updated_at,omitzero"`
}

// NewSettings are the complete set: zero fields reset to defaults.
type NewSettings struct {
	Locked       bool   `json:"locked"`
	Premoderated bool   `json:"premoderated"`
	Title        string `json:"title,omitempty"`
}

// ThreadVersion has the settings for a post's comments at one version.
type ThreadVersion struct {
	VersionInfo
	Thread ThreadSettings `json:"thread"`
}

// SettingsVersion has the settings for the children of an object of any kind at one version.
type SettingsVersion struct {
	VersionInfo
	Settings ChildSettings `json:"settings"`
}

// Summary has the counts of an object's children.
type Summary struct {
	Total          int64     `json:"total"` // ever written, deleted ones included
	Visible        int64     `json:"visible"`
	LastActivityAt time.Time `json:"last_activity_at,omitzero"` // when the newest visible one was written
	AsOf           time.Time `json:"as_of"`
}

func (s *Summary) asOf() time.Time { return s.AsOf }

// ChildSummary has the counts of an object's children of any kind.
type ChildSummary struct {
	Object ID `json:"object_id"`
	Summary
	Thread *ThreadState `json:"thread,omitempty"` // only of a moderated kind
}

// CommentTree has all comments of a post.
type CommentTree struct {
	Items  []CommentInTree `json:"items"`
	Thread ThreadState     `json:"thread"`
	AsOf   time.Time       `json:"as_of"`
}

func (t *CommentTree) asOf() time.Time { return t.AsOf }

// CommentInTree is a comment with its replies.
type CommentInTree struct {
	Comment
	Replies []CommentInTree `json:"replies,omitempty"`
}

// CommentWithThread is a comment that was read by its permalink.
type CommentWithThread struct {
	Comment
	Thread ThreadState `json:"thread"`
	AsOf   time.Time   `json:"as_of"`
}

func (t *CommentWithThread) asOf() time.Time { return t.AsOf }

// ChildTreeOf has all children of an object of any kind.
type ChildTreeOf[A any] struct {
	Items  []ChildInTreeOf[A] `json:"items"`
	Thread *ThreadState       `json:"thread,omitempty"` // only of a moderated kind
	AsOf   time.Time          `json:"as_of"`
}

func (t *ChildTreeOf[A]) asOf() time.Time { return t.AsOf }

// ChildInTreeOf is a child with its replies.
type ChildInTreeOf[A any] struct {
	ChildOf[A]
	Replies []ChildInTreeOf[A] `json:"replies,omitempty"`
}

// ChildWithThreadOf is a child that was read by its permalink.
type ChildWithThreadOf[A any] struct {
	ChildOf[A]
	Thread *ThreadState `json:"thread,omitempty"` // only of a moderated kind
	AsOf   time.Time    `json:"as_of"`
}

func (t *ChildWithThreadOf[A]) asOf() time.Time { return t.AsOf }

// ModeratedChildren has the operations on children that moderators decide on.
type ModeratedChildren[C Versioned, N, D, V any] struct{ Children[C, N, D, V] }

// ThreadedChildren has the operations on children that reply to each other and that moderators
// decide on.
type ThreadedChildren[C Versioned, N, D, V any] struct{ ModeratedChildren[C, N, D, V] }

// Replies lists all replies below a child, at any depth, in the order of the thread.
func (t ThreadedChildren[C, N, D, V]) Replies(id string, opts ...Option) *List[C] {
	return lazily[C](t.core, t.where(func(k childKind) string { return k.one(id) + "/replies" }), true, opts)
}

// Moderation is a moderator's decision.
type Moderation struct {
	State  string `json:"state"` // APPROVED, HIDDEN, REMOVED, or PENDING (waits for a moderator)
	Reason string `json:"reason,omitempty"`
}

// Moderate decides on a child on the condition that its version is still child's (If-Match). It
// needs the role moderate.
func (m ModeratedChildren[C, N, D, V]) Moderate(ctx context.Context, child C, to Moderation, opts ...Option) (C, error) {
	id, version := child.Ref()
	return ask[C](ctx, m.Children, func(k childKind) *call {
		c := newCall(http.MethodPut, k.one(id)+"/moderation", opts).json(to).matching(version)
		c.subject = k.one(id)
		return c
	})
}

// Pending lists the children that wait for a moderator, oldest first, of all objects. With Query it
// lists those of one object: Query("post_id", "7"). It needs the role moderate.
func (m ModeratedChildren[C, N, D, V]) Pending(opts ...Option) *List[C] {
	return lazily[C](m.core, m.where(childKind.pending), true, opts)
}

// guard makes PutSettings conditional: on the version of the settings that were read, or on the
// absence of settings.
func guard(k *call, version int64) *call {
	if version > 0 {
		return k.matching(version)
	}
	if k.header.Get("If-Match") == "" && k.header.Get("If-None-Match") == "" {
		k.set("If-None-Match", "*")
	}
	return k
}

// Tree reads all comments of a post, up to 1,000.
func (c Comments) Tree(ctx context.Context, post ID, opts ...Option) (CommentTree, error) {
	return ask[CommentTree](ctx, c.Children, func(k childKind) *call {
		return newCall(http.MethodGet, k.under(post)+"/tree", opts).projected()
	})
}

// BySlug reads a comment by its permalink.
func (c Comments) BySlug(ctx context.Context, post ID, slug string, opts ...Option) (CommentWithThread, error) {
	return ask[CommentWithThread](ctx, c.Children, func(k childKind) *call {
		return newCall(http.MethodGet, k.under(post)+"/by-slug/"+url.PathEscape(slug), opts).projected()
	})
}

// Settings reads the settings for the comments of a post from the truth.
func (c Comments) Settings(ctx context.Context, post ID, opts ...Option) (ThreadSettings, error) {
	return ask[ThreadSettings](ctx, c.Children, func(k childKind) *call { return newCall(http.MethodGet, k.settings(post), opts) })
}

// PutSettings replaces settings on the condition that they have not changed since they were read.
// was names the post and the version. It needs the role moderate.
func (c Comments) PutSettings(ctx context.Context, was ThreadSettings, settings NewSettings, opts ...Option) (ThreadSettings, error) {
	return ask[ThreadSettings](ctx, c.Children, func(k childKind) *call {
		return guard(newCall(http.MethodPut, k.settings(was.PostID), opts).json(settings), was.Version)
	})
}

// SettingsVersions lists the versions of the settings for the comments of a post, newest first.
func (c Comments) SettingsVersions(post ID, opts ...Option) *List[ThreadVersion] {
	return lazily[ThreadVersion](c.core, c.where(func(k childKind) string { return k.settings(post) + "/versions" }), false, opts)
}

// NamedChildren has the operations on a kind of children by its name. A is the type of its
// attributes. The API refuses thread operations if the kind has no threads.
type NamedChildren[A any] struct {
	ThreadedChildren[ChildOf[A], NewChildOf[A], ChildEditOf[A], ChildVersionOf[A]]
}

// AnyChildren has the operations on a kind of children by its name.
type AnyChildren = NamedChildren[map[string]any]

// Children is ChildrenOf with a map for the attributes.
func (c *Calls) Children(kind string) AnyChildren { return ChildrenOf[map[string]any](c, kind) }

// ChildrenOf returns the operations on the kind of children of this name, whose attributes a
// program reads and writes as an A, like EdgesOf. It sends nothing. The first operation reads the
// names of the kind's members from the API. It returns an *UnknownKindError if the API has no such
// kind.
func ChildrenOf[A any](by Caller, kind string) NamedChildren[A] {
	c := by.calls()
	find := func(ctx context.Context) (childKind, error) {
		list, k, err := kindNamed(ctx, c.core, kind, func(l *KindList) []ChildKind { return l.Children })
		if err != nil {
			return childKind{}, err
		}
		return childKind{name: k.Name, plural: k.Plural, parent: k.Parent, parentPath: list.plural(k.Parent),
			names: names{k.Name + "_id": "child_id", k.Parent + "_id": "object_id", k.Name: "child"}}, nil
	}
	var all NamedChildren[A]
	all.core, all.find = c.core, find
	return all
}

// Summary counts the children of an object.
func (a NamedChildren[A]) Summary(ctx context.Context, object ID, opts ...Option) (ChildSummary, error) {
	return ask[ChildSummary](ctx, a.Children, func(k childKind) *call {
		return newCall(http.MethodGet, k.summary(object), opts).projected()
	})
}

// Tree reads all children of an object, up to 1,000.
func (a NamedChildren[A]) Tree(ctx context.Context, object ID, opts ...Option) (ChildTreeOf[A], error) {
	return ask[ChildTreeOf[A]](ctx, a.Children, func(k childKind) *call {
		return newCall(http.MethodGet, k.under(object)+"/tree", opts).projected()
	})
}

// BySlug reads a child by its permalink.
func (a NamedChildren[A]) BySlug(ctx context.Context, object ID, slug string, opts ...Option) (ChildWithThreadOf[A], error) {
	return ask[ChildWithThreadOf[A]](ctx, a.Children, func(k childKind) *call {
		return newCall(http.MethodGet, k.under(object)+"/by-slug/"+url.PathEscape(slug), opts).projected()
	})
}

// Settings reads the settings for the children of an object from the truth.
func (a NamedChildren[A]) Settings(ctx context.Context, object ID, opts ...Option) (ChildSettings, error) {
	return ask[ChildSettings](ctx, a.Children, func(k childKind) *call { return newCall(http.MethodGet, k.settings(object), opts) })
}

// PutSettings replaces settings on the condition that they have not changed since they were read.
// was names the object and the version. It needs the role moderate.
func (a NamedChildren[A]) PutSettings(ctx context.Context, was ChildSettings, settings NewSettings, opts ...Option) (ChildSettings, error) {
	return ask[ChildSettings](ctx, a.Children, func(k childKind) *call {
		return guard(newCall(http.MethodPut, k.settings(was.Object), opts).json(settings), was.Version)
	})
}

// SettingsVersions lists the versions of the settings for the children of an object, newest first.
func (a NamedChildren[A]) SettingsVersions(object ID, opts ...Option) *List[SettingsVersion] {
	return lazily[SettingsVersion](a.core, func(ctx context.Context) (string, names, error) {
		k, err := a.kind(ctx)
		n := names{k.parent + "_id": "object_id"}
		if k.name == commentKind.name {
			n["thread"] = "settings"
		}
		return k.settings(object) + "/versions", n, err
	}, false, opts)
}
