package console

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/tidings/tidings/consumers"
	"github.com/tidings/tidings/internal/broker"
	"github.com/tidings/tidings/internal/daemon"
	"github.com/tidings/tidings/internal/postgres"
	bounds "github.com/tidings/tidings/internal/shares"
	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/kinds/catalog"
	"github.com/tidings/tidings/ops/letters"
	"github.com/tidings/tidings/ops/samples"
	"github.com/tidings/tidings/ops/status"
	"github.com/tidings/tidings/outbox"
	"github.com/tidings/tidings/projections"
	"github.com/tidings/tidings/store"
)

//go:embed templates assets
var files embed.FS

const (
	root        = "/console/"
	pageTimeout = 10 * time.Second // limit for the reads of one page
	maxForm     = 64 << 10         // bytes of a form's body
	maxFile     = 256 << 10        // and of one with a file of kinds
)

// Console is the handler of /console/. It is safe for concurrent use.
type Console struct {
	cfg       Config
	deps      Deps
	log       *slog.Logger
	seals     sealer
	found     sessions
	guesses   guesses
	pages     []*page
	acts      map[string]*act
	templates map[string]*template.Template // by page name
	assets    string                        // the hash of all assets, part of their URLs
	live      *hub
	streams   *bounds.Pool // of live pages
	observer  *observer
	day       *samples.Day
	jobs      chan func(context.Context)
	mu        sync.Mutex
	running   map[actKey]*doing
	handler   http.Handler

	store *store.Store // writes to deps.Truth for moderators
	desk  *letters.Desk
}

// New returns the console. It starts nothing and connects to nothing: acts and live pages work only
// while Run runs. It returns an error if deps.Keys is empty.
func New(cfg Config, deps Deps) (*Console, error) {
	seals, err := newSealer(deps.Keys)
	if err != nil {
		return nil, err
	}
	c := &Console{cfg: cfg, deps: deps, log: deps.Log.With("component", "console"), seals: seals,
		found: newSessions(tokens.NewLookup(deps.Truth)), guesses: newGuesses(),
		acts: make(map[string]*act), templates: make(map[string]*template.Template), jobs: make(chan func(context.Context)),
		running: make(map[actKey]*doing), store: store.New(deps.Truth, deps.Wake)}
	c.desk = letters.New(deps.Truth, deps.Projections, outbox.NewDLQ(deps.Truth, deps.Wake),
		consumers.NewDeadLetters(deps.Projections, deps.Fleet...), deps.Log)
	c.desk.OnCompleted(c.completeAct)
	c.pages = c.allPages()
	for _, a := range c.allActs() {
		c.acts[a.name] = a
	}
	c.live, c.streams = newHub(c), bounds.NewPool(bounds.LivePages, bounds.LivePages.All.N)
	src := status.Sources{Truth: deps.Truth, Projections: deps.Projections, NATS: deps.NATS, JetStream: deps.JetStream, Broker: deps.Broker}
	for _, p := range deps.Fleet {
		src.Consumers = append(src.Consumers, p.Name())
	}
	c.observer, c.day = newObserver(src), samples.NewDay(deps.Truth)
	if err := c.parse(); err != nil {
		return nil, err
	}
	c.handler = c.routes()
	return c, nil
}

// parse parses the templates and computes the hash of the assets.
func (c *Console) parse() error {
	base, err := template.New("").Funcs(c.funcs()).ParseFS(files, "templates/layout.html", "templates/parts.html")
	if err != nil {
		return fmt.Errorf("parse the console's layout: %w", err)
	}
	names := []string{"signin", "error", "act", "outcome"}
	for _, p := range c.pages {
		names = append(names, p.name())
	}
	for _, name := range names {
		t, err := base.Clone()
		if err == nil {
			t, err = t.ParseFS(files, "templates/"+name+".html")
		}
		if err != nil {
			return fmt.Errorf("parse the console's page %s: %w", name, err)
		}
		c.templates[name] = t
	}
	h := sha256.New()
	err = fs.WalkDir(files, "assets", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := files.ReadFile(path)
		h.Write(b)
		return err
	})
	c.assets = hex.EncodeToString(h.Sum(nil)[:6])
	return err
}

func (c *Console) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+root+"assets/{hash}/{file...}", c.asset)
	mux.HandleFunc("GET "+root+"sign-in", c.signInForm)
	mux.HandleFunc("POST "+root+"sign-in", c.signIn)
	mux.HandleFunc("POST "+root+"sign-out", c.signOut)
	for _, p := range c.pages {
		pattern := root + p.path
		if p.path == "" {
			pattern += "{$}"
		}
		mux.Handle("GET "+pattern, c.signedIn(func(v *view) error { return c.showPage(v, p) }))
		if p.live {
			mux.Handle("GET "+root+"live/"+p.name(), c.signedIn(func(v *view) error { return c.stream(v, p) }))
		}
	}
	mux.Handle("GET "+root+"find", c.signedIn(c.find))
	mux.Handle("GET "+root+"audit.ndjson", c.signedIn(c.exportAudit))
	mux.Handle("GET "+root+"act/{act}", c.signedIn(c.confirmAct))
	mux.Handle("POST "+root+"act/{act}", c.signedIn(c.takeAct))
	mux.Handle("GET "+root+"acts/{id}", c.signedIn(c.showAct))
	mux.Handle(root, c.signedIn(func(v *view) error {
		probe := &http.Request{Method: http.MethodGet, URL: v.r.URL, Host: v.r.Host}
		if _, pattern := mux.Handler(probe); v.r.Method != http.MethodGet && v.r.Method != http.MethodHead && pattern != root {
			v.w.Header().Set("Allow", "GET, HEAD")
			return &problem{http.StatusMethodNotAllowed, "This page is for reading", "An act is sent by the form that its button opens."}
		}
		return errNotFound
	}))
	mux.Handle("/console", http.RedirectHandler(root, http.StatusSeeOther))
	cross := http.NewCrossOriginProtection()
	cross.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.fail(&view{c: c, w: w, r: r}, &problem{http.StatusForbidden, "The request comes from another site",
			"The console takes writes from its own pages only. Open the page here and send the form again."})
	}))
	return cross.Handler(mux)
}

// ServeHTTP sets the security headers of every answer and serves it. A page shows and runs only
// files of its own origin, and nothing inline. No site may frame it. No cache keeps an answer,
// except the assets.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "same-origin")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
	most := int64(maxForm)
	if r.URL.Path == root+"act/"+actKinds {
		most = maxFile
	}
	r.Body = http.MaxBytesReader(w, r.Body, most)
	c.handler.ServeHTTP(w, r)
}

// Front returns a handler that sends requests below /console to the console, and all others to
// next. A nil Console is switched off: next gets every request.
func (c *Console) Front(next http.Handler) http.Handler {
	if c == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/console" || strings.HasPrefix(r.URL.Path, root) {
			c.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// Run samples the last day, reads live pages while somebody watches them, and does the acts, until
// ctx ends. Then it ends the streams, cancels the context of acts in progress, and returns nil when
// they have ended. On a nil Console it returns at once.
func (c *Console) Run(ctx context.Context) error {
	if c == nil {
		return nil
	}
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { c.live.run(ctx); return nil })
	g.Go(func() error { return c.desk.Run(ctx) })
	g.Go(func() error { c.observer.run(ctx); return nil })
	g.Go(func() error {
		return samples.Sampler{Pool: c.deps.Truth, Source: samples.Installation, Version: daemon.Version(), Read: c.sample,
			Log: c.log}.Run(ctx)
	})
	g.Go(func() error {
		for {
			select {
			case job := <-c.jobs:
				g.Go(func() error { job(ctx); return nil })
			case <-ctx.Done():
				return nil
			}
		}
	})
	return g.Wait()
}

// asset serves one asset. Its URL contains the hash of all assets, so a browser may cache it for a
// year.
func (c *Console) asset(w http.ResponseWriter, r *http.Request) {
	name := "assets/" + r.PathValue("file")
	if info, err := fs.Stat(files, name); err != nil || info.IsDir() {
		http.NotFound(w, r)
		return
	}
	if r.PathValue("hash") == c.assets {
		w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
	}
	http.ServeFileFS(w, r, files, name)
}

// signedIn wraps h for readers who are signed in. Others get the sign-in form, which then leads to
// the page that they asked for.
func (c *Console) signedIn(h func(*view) error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		v := &view{c: c, w: w, r: r}
		who, hash, err := c.session(r)
		if errors.Is(err, tokens.ErrUnauthenticated) {
			c.toSignIn(w, r)
			return
		}
		v.who, v.hash = who, hash
		if err == nil {
			err = h(v)
		}
		if err != nil {
			c.fail(v, err)
		}
	})
}

// Config is the console's environment.
type Config struct {
	On       bool `env:"CONSOLE, default=false"`           // serve /console/
	ReadOnly bool `env:"CONSOLE_READ_ONLY, default=false"` // offer and take no act
	// TraceURL is the address of a trace viewer, with {trace_id} in place of the trace's id.
	// Without it, an event's page shows the id alone.
	TraceURL string `env:"CONSOLE_TRACE_URL"`
}

// Conns is the number of connections of each of the console's pools. Few are enough: all watchers
// share one read per second, and few people act at once.
const Conns = 4

// Deps are the dependencies of the console. Both pools act as postgres.RoleSystem.
type Deps struct {
	Truth       *pgxpool.Pool
	Projections *pgxpool.Pool
	NATS        *nats.Conn
	JetStream   jetstream.JetStream // on NATS; pages report when its servers are unavailable
	Broker      broker.Config
	Kinds       *catalog.Catalog // the kinds that the truth has in force
	Fleet       []projections.Projection
	Wake        func(slot int) // wakes the relay after a write that appended events; nil: the relay polls
	// OwnerURL connects to the database of Projections with a login that owns its tables, for
	// replays. If it is empty, the console names the command instead.
	OwnerURL string
	Postgres postgres.Config // for the connections of a replay
	Keys     [][]byte        // encrypt sessions: the first key seals, every key opens; from api.Config.CursorKeys
	Log      *slog.Logger
}
