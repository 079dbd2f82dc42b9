package api

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/tidings/tidings/event"
	"github.com/tidings/tidings/projections/threadcache"
	"github.com/tidings/tidings/tokens"
)

// maxTree is how many comments a tree has at most in one document.
const maxTree = 1000

// ThreadState is what holds for the thread that a page is of.
type ThreadState struct {
	Locked       bool   `json:"locked" example:"false" doc:"It takes no more comments."`
	Premoderated bool   `json:"premoderated" example:"false" doc:"New comments start pending."`
	Title        string `json:"title,omitempty" example:"Questions to the author" doc:"Absent when none is set."`
	Version      int64  `json:"version" example:"2" doc:"Of the settings; 0 while nothing was set."`
}

// CommentList is one page of comments of any posts.
type CommentList struct {
	Items []*Comment `json:"items" nullable:"false"`
	Next  string     `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
	AsOf  event.Time `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the list."`
}

// ThreadPage is one page of a thread.
type ThreadPage struct {
	Items  []*Comment  `json:"items" nullable:"false"`
	Next   string      `json:"next,omitempty" doc:"The cursor of the next page; absent on the last."`
	Prev   string      `json:"prev,omitempty" doc:"The cursor of the page before, in the orders oldest and newest; absent on the first. What it leads to may be gone by then."`
	Thread ThreadState `json:"thread"`
	AsOf   event.Time  `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the page."`
}

// TreeComment is a comment with its replies.
type TreeComment struct {
	Comment
	Replies []*TreeComment `json:"replies,omitempty" doc:"The oldest first."`
}

// Tree is a whole thread.
type Tree struct {
	Items  []*TreeComment `json:"items" nullable:"false" doc:"The first comments, the oldest first."`
	Thread ThreadState    `json:"thread"`
	AsOf   event.Time     `json:"as_of" format:"date-time" doc:"Everything that was published up to then is in the tree."`
}

// ThreadSummary is a thread in numbers.
type ThreadSummary struct {
	PostID         event.ID    `json:"post_id"`
	Visible        int64       `json:"visible" example:"128" doc:"Comments that are visible."`
	Total          int64       `json:"total" example:"131" doc:"Comments that were ever written, whatever became of them."`
	LastActivityAt *event.Time `json:"last_activity_at,omitempty" format:"date-time" doc:"When the newest visible comment was written; absent without any."`
	Thread         ThreadState `json:"thread"`
	AsOf           event.Time  `json:"as_of" format:"date-time" doc:"Everything that was published up to then is counted."`
}

// ThreadComment is one comment of a thread.
type ThreadComment struct {
	Comment
	Thread ThreadState `json:"thread"`
	AsOf   event.Time  `json:"as_of" format:"date-time" doc:"Everything that was published up to then has been looked at."`
}

type threadInput struct {
	PostPath
	Order  string    `query:"order" default:"oldest" enum:"oldest,newest,threaded" example:"newest" doc:"oldest and newest: visible comments by age. threaded: each comment, then its replies; a gone comment with a visible one below it is a tombstone."`
	Skip   int64     `query:"skip" minimum:"0" example:"200" doc:"Begin behind this many visible comments, in the orders oldest and newest. Not together with cursor or around."`
	Around commentID `query:"around" doc:"The page with this comment in its middle, the oldest first. Of a gone comment it is the page around its place. Not together with cursor or skip."`
	Page
}

type threadOutput struct{ Body ThreadPage }

type repliesInput struct {
	CommentPath
	Page
}

type treeOutput struct{ Body Tree }

type summaryOutput struct{ Body ThreadSummary }

type slugInput struct {
	PostPath
	Slug string `path:"slug" pattern:"^[0-9a-z]{8}$" patternDescription:"8 digits and lower-case letters"`
}

type slugOutput struct{ Body ThreadComment } // without an ETag: the version says nothing of the thread, or of as_of

type authorInput struct {
	UserPath
	Page
}

type pendingInput struct {
	PostID id `query:"post_id" doc:"Only of this post."`
	Page
}

type commentListOutput struct{ Body CommentList }

func (s *server) discussionRoutes() {
	const post, tag = "/v1/posts/{post_id}/comments", "Comments"
	register(s, route{
		method: http.MethodGet, path: post, id: "list-comments", tag: tag, role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary: "List the comments of a post", description: "From a projection. A post that nobody knows has none.",
		codes: []string{codeCursorInvalid, codeNotFound},
	}, s.listComments)
	register(s, route{
		method: http.MethodGet, path: post + "/tree", id: "get-tree", tag: tag, role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary:     "Read a whole thread as one document",
		description: fmt.Sprintf("From a projection. Up to %d comments, tombstones included; what has more is read in pages.", maxTree),
		codes:       []string{codeThreadTooLarge},
	}, s.tree)
	register(s, route{
		method: http.MethodGet, path: post + "/by-slug/{slug}", id: "get-comment-by-slug", tag: tag, role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary:     "Read a comment by its permalink",
		description: "From a projection. A comment that is gone is a tombstone. `around` of the list shows it in its surroundings.",
		codes:       []string{codeNotFound},
	}, s.bySlug)
	register(s, route{
		method: http.MethodGet, path: "/v1/posts/{post_id}/summary", id: "get-summary", tag: tag, role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary: "Read a thread in numbers", description: "From a projection. A post that nobody knows has 0.",
	}, s.summary)
	register(s, route{
		method: http.MethodGet, path: "/v1/comments/{id}/replies", id: "list-replies", tag: tag, role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary:     "List all that is below a comment",
		description: "From a projection, in the order of the thread: each comment, then its replies, at any depth. A gone comment with a visible one below it is a tombstone.",
		codes:       []string{codeCursorInvalid, codeNotFound},
	}, s.replies)
	register(s, route{
		method: http.MethodGet, path: "/v1/users/{id}/comments", id: "list-users-comments", tag: "Users", role: tokens.RoleRead, status: http.StatusOK, projected: true,
		summary: "List a user's visible comments, newest first", description: "From a projection. A user that nobody knows has none.",
		codes: []string{codeCursorInvalid},
	}, s.commentsOfUser)
	register(s, route{
		method: http.MethodGet, path: "/v1/moderation/pending", id: "list-pending", tag: "Moderation", role: tokens.RoleModerate, status: http.StatusOK, projected: true,
		summary: "List the comments that wait for a moderator, oldest first", description: "From a projection, with their bodies.",
		codes: []string{codeCursorInvalid},
	}, s.pending)
}

// projectThread reads the thread of a post, and what is set for it.
func (s *server) projectThread(ctx context.Context, post int64, fn func(tx pgx.Tx) error) (ThreadState, event.Time, error) {
	var settings threadcache.Settings
	asOf, err := s.project(ctx, callerOf(ctx).TenantID, threadcache.Name, func(tx pgx.Tx) (err error) {
		if settings, err = threadcache.ReadSettings(ctx, tx, commentKind.Name, post); err != nil {
			return err
		}
		return fn(tx)
	})
	return ThreadState(settings), asOf, err
}

func (s *server) notFound() error { return s.problems.problem(codeNotFound, "") }

// placeCursor is what a cursor of a chronological page carries. Before asks for the page that ends there.
type placeCursor struct {
	At     event.Time `json:"t"`
	ID     string     `json:"c"`
	Before bool       `json:"b,omitempty"`
}

func cursorAt(c event.Child) placeCursor { return placeCursor{At: c.CreatedAt, ID: c.ID} }

func (c placeCursor) key() *threadcache.Key {
	return &threadcache.Key{CreatedAt: c.At.Time, ChildID: c.ID}
}

// checkPlace refuses parameters that ask for two places at once.
func (s *server) checkPlace(order string, in Place) error {
	refuse := func(parameter, detail string) error {
		return s.problems.problem(codeValidation, "", FieldError{Detail: detail, Parameter: parameter})
	}
	switch {
	case in.Skip > 0 && order == "threaded":
		return refuse("skip", "want the order oldest or newest")
	case in.Skip > 0 && (in.Cursor != "" || in.Around != ""):
		return refuse("skip", "want skip alone, without cursor and around")
	case in.Around != "" && order != "oldest":
		return refuse("around", "want the order oldest")
	case in.Around != "" && in.Cursor != "":
		return refuse("around", "want around alone, without cursor and skip")
	}
	return nil
}

func (s *server) listComments(ctx context.Context, in *threadInput) (*threadOutput, error) {
	if err := s.checkPlace(in.Order, Place{in.Skip, in.Around, in.Page}); err != nil {
		return nil, err
	}
	post := in.PostID.int64()
	l := list{tenant: callerOf(ctx).TenantID, name: "comments " + in.Order, of: post}
	if in.Order == "threaded" {
		return s.threadedPage(ctx, l, post, in.Page, func(tx pgx.Tx, after string) ([]event.Child, error) {
			return threadcache.Threaded(ctx, tx, commentKind.Name, post, after, in.Limit+1)
		})
	}
	var cursor placeCursor
	if in.Cursor != "" {
		if err := s.cursors.decode(l, in.Cursor, &cursor); err != nil {
			return nil, err
		}
	}
	var rows []event.Child
	var earlier, later bool // whether there are pages before and behind this one
	thread, asOf, err := s.projectThread(ctx, post, func(tx pgx.Tx) (err error) {
		if in.Around == "" {
			rows, earlier, later, err = chronological(ctx, tx, commentKind.Name, post, threadcache.Order(in.Order == "newest"), Place{in.Skip, in.Around, in.Page}, cursor)
			return err
		}
		c, found, err := threadcache.ByID(ctx, tx, commentKind.Name, in.Around.lower())
		if err == nil && (!found || int64(c.Parent) != post) {
			err = s.notFound()
		}
		if err != nil {
			return err
		}
		rows, earlier, later, err = threadcache.Around(ctx, tx, commentKind.Name, c, in.Limit)
		return err
	})
	if err != nil {
		return nil, err
	}
	page := ThreadPage{Items: commentsOf(rows), Thread: thread, AsOf: asOf}
	if later && len(rows) > 0 {
		if page.Next, err = s.cursors.encode(l, cursorAt(rows[len(rows)-1])); err != nil {
			return nil, err
		}
	}
	if earlier && len(rows) > 0 {
		before := cursorAt(rows[0])
		before.Before = true
		if page.Prev, err = s.cursors.encode(l, before); err != nil {
			return nil, err
		}
	}
	return &threadOutput{Body: page}, nil
}

// chronological reads a page from its beginning, from a cursor on either way, or behind a number of children.
func chronological(ctx context.Context, tx pgx.Tx, kind string, object int64, order threadcache.Order, in Place, cursor placeCursor) (rows []event.Child, earlier, later bool, err error) {
	switch {
	case in.Skip > 0:
		rows, err = threadcache.Skip(ctx, tx, kind, object, order, in.Skip, in.Limit+1)
		earlier = true
	case cursor.Before:
		rows, err = threadcache.Page(ctx, tx, kind, object, !order, cursor.key(), in.Limit+1)
		earlier, later = len(rows) > in.Limit, true
		rows = rows[:min(len(rows), in.Limit)]
		slices.Reverse(rows)
		return rows, earlier, later, err
	case in.Cursor != "":
		rows, err = threadcache.Page(ctx, tx, kind, object, order, cursor.key(), in.Limit+1)
		earlier = true
	default:
		rows, err = threadcache.Page(ctx, tx, kind, object, order, nil, in.Limit+1)
	}
	later = len(rows) > in.Limit
	return rows[:min(len(rows), in.Limit)], earlier, later, err
}

// threadedPage is a page in the order of the thread; read reads one more than the limit.
func (s *server) threadedPage(ctx context.Context, l list, post int64, p Page, read func(tx pgx.Tx, after string) ([]event.Child, error)) (*threadOutput, error) {
	var after string
	if p.Cursor != "" {
		if err := s.cursors.decode(l, p.Cursor, &after); err != nil {
			return nil, err
		}
	}
	var rows []event.Child
	thread, asOf, err := s.projectThread(ctx, post, func(tx pgx.Tx) (err error) {
		rows, err = read(tx, after)
		return err
	})
	if err != nil {
		return nil, err
	}
	rows, next, err := newPage(s, l, p.Limit, rows, func(c event.Child) any { return c.Path })
	if err != nil {
		return nil, err
	}
	return &threadOutput{Body: ThreadPage{Items: commentsOf(rows), Next: next, Thread: thread, AsOf: asOf}}, nil
}

func (s *server) replies(ctx context.Context, in *repliesInput) (*threadOutput, error) {
	tenant, id := callerOf(ctx).TenantID, in.ID.lower()
	var of event.Child
	if _, err := s.project(ctx, tenant, threadcache.Name, func(tx pgx.Tx) error {
		c, found, err := threadcache.ByID(ctx, tx, commentKind.Name, id)
		if err == nil && !found {
			err = s.notFound()
		}
		of = c
		return err
	}); err != nil {
		return nil, err
	}
	// What a comment's place is never changes, so another transaction may read what is below it.
	l := list{tenant: tenant, name: "replies " + id, of: int64(of.Parent)}
	return s.threadedPage(ctx, l, int64(of.Parent), in.Page, func(tx pgx.Tx, after string) ([]event.Child, error) {
		return threadcache.Replies(ctx, tx, commentKind.Name, int64(of.Parent), of.Path, after, in.Limit+1)
	})
}

func (s *server) tree(ctx context.Context, in *PostPath) (*treeOutput, error) {
	post := in.PostID.int64()
	var rows []event.Child
	thread, asOf, err := s.projectThread(ctx, post, func(tx pgx.Tx) (err error) {
		rows, err = threadcache.Threaded(ctx, tx, commentKind.Name, post, "", maxTree+1)
		return err
	})
	if err != nil {
		return nil, err
	}
	if len(rows) > maxTree {
		return nil, s.problems.problem(codeThreadTooLarge, fmt.Sprintf(
			"read /v1/posts/%d/comments?order=threaded page by page, or /v1/comments/{id}/replies for what is below one comment", post))
	}
	return &treeOutput{Body: Tree{Items: nest(rows), Thread: thread, AsOf: asOf}}, nil
}

// nest makes a tree of comments in the order of the thread. One whose parent is not among them (its event waits in the DLQ, say)
// is below the nearest ancestor that is.
func nest(rows []event.Child) []*TreeComment {
	type open struct {
		path string
		node *TreeComment
	}
	root := &TreeComment{Replies: []*TreeComment{}}
	stack := []open{{node: root}}
	for _, c := range rows {
		for len(stack) > 1 && !strings.HasPrefix(c.Path, stack[len(stack)-1].path+"/") {
			stack = stack[:len(stack)-1]
		}
		node := &TreeComment{Comment: *commentOf(c.Comment())}
		parent := stack[len(stack)-1].node
		parent.Replies = append(parent.Replies, node)
		stack = append(stack, open{c.Path, node})
	}
	return root.Replies
}

func (s *server) bySlug(ctx context.Context, in *slugInput) (*slugOutput, error) {
	var c event.Child
	thread, asOf, err := s.projectThread(ctx, in.PostID.int64(), func(tx pgx.Tx) error {
		var found bool
		var err error
		c, found, err = threadcache.BySlug(ctx, tx, commentKind.Name, in.PostID.int64(), in.Slug)
		if err == nil && !found {
			err = s.notFound()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return &slugOutput{Body: ThreadComment{Comment: *commentOf(c.Comment()), Thread: thread, AsOf: asOf}}, nil
}

func (s *server) summary(ctx context.Context, in *PostPath) (*summaryOutput, error) {
	var sum threadcache.Summary
	thread, asOf, err := s.projectThread(ctx, in.PostID.int64(), func(tx pgx.Tx) (err error) {
		sum, err = threadcache.ReadSummary(ctx, tx, commentKind.Name, in.PostID.int64())
		return err
	})
	if err != nil {
		return nil, err
	}
	out := ThreadSummary{PostID: in.PostID.ID, Visible: sum.Visible, Total: sum.Total, Thread: thread, AsOf: asOf}
	if sum.LastAt != nil {
		out.LastActivityAt = &event.Time{Time: *sum.LastAt}
	}
	return &summaryOutput{Body: out}, nil
}

func (s *server) commentsOfUser(ctx context.Context, in *authorInput) (*commentListOutput, error) {
	author := in.ID.int64()
	l := list{tenant: callerOf(ctx).TenantID, name: "comments of user", of: author}
	return s.commentList(ctx, l, in.Page, func(tx pgx.Tx, after *threadcache.Key) ([]event.Child, error) {
		return threadcache.ByAuthor(ctx, tx, commentKind.Name, author, after, in.Limit+1)
	})
}

func (s *server) pending(ctx context.Context, in *pendingInput) (*commentListOutput, error) {
	post := in.PostID.int64() // 0 when absent
	l := list{tenant: callerOf(ctx).TenantID, name: "pending", of: post}
	return s.commentList(ctx, l, in.Page, func(tx pgx.Tx, after *threadcache.Key) ([]event.Child, error) {
		return threadcache.Pending(ctx, tx, commentKind.Name, post, after, in.Limit+1)
	})
}

// commentList is a page of comments of any posts; read reads one more than the limit.
func (s *server) commentList(ctx context.Context, l list, p Page, read func(tx pgx.Tx, after *threadcache.Key) ([]event.Child, error)) (*commentListOutput, error) {
	rows, next, asOf, err := s.childPage(ctx, l, p, read)
	if err != nil {
		return nil, err
	}
	return &commentListOutput{Body: CommentList{Items: commentsOf(rows), Next: next, AsOf: asOf}}, nil
}

// childPage reads a page of children of any objects; read reads one more than the limit.
func (s *server) childPage(ctx context.Context, l list, p Page, read func(tx pgx.Tx, after *threadcache.Key) ([]event.Child, error)) (rows []event.Child, next string, asOf event.Time, err error) {
	var after *threadcache.Key
	if p.Cursor != "" {
		var c placeCursor
		if err := s.cursors.decode(l, p.Cursor, &c); err != nil {
			return nil, "", asOf, err
		}
		after = c.key()
	}
	asOf, err = s.project(ctx, l.tenant, threadcache.Name, func(tx pgx.Tx) (err error) {
		rows, err = read(tx, after)
		return err
	})
	if err != nil {
		return nil, "", asOf, err
	}
	rows, next, err = newPage(s, l, p.Limit, rows, func(c event.Child) any { return cursorAt(c) })
	return rows, next, asOf, err
}

func commentsOf(rows []event.Child) []*Comment {
	items := make([]*Comment, len(rows))
	for i, c := range rows {
		items[i] = commentOf(c.Comment())
	}
	return items
}
