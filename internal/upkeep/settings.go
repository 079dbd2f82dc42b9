package upkeep

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/coldstore"
	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/versioned"
)

// Span is a time.Duration that is written as text, such as 168h0m0s.
type Span time.Duration

// MarshalText writes the duration as time.Duration does.
func (s Span) MarshalText() ([]byte, error) { return []byte(time.Duration(s).String()), nil }

// UnmarshalText reads what time.ParseDuration does.
func (s *Span) UnmarshalText(b []byte) error {
	d, err := time.ParseDuration(string(b))
	*s = Span(d)
	return err
}

// Settings say what is archived and what is dropped, and when. They are in the truth's database: the archiver and every command go by the same ones.
type Settings struct {
	OutboxArchiveAfter  Span   `json:"outbox_archive_after"`
	OutboxArchiveKeep   Span   `json:"outbox_archive_keep"`
	OutboxExportURL     string `json:"outbox_archive_export_url"`
	CommentArchiveAfter Span   `json:"comment_archive_after"`
	CommentHistoryAfter Span   `json:"comment_history_after"`
	FollowHistoryAfter  Span   `json:"follow_history_after"`
	ThreadsAfter        Span   `json:"threads_after"`
	CommentKeysKeep     Span   `json:"comment_keys_keep"`
}

// Default is what holds where nothing was set. That threads are archived after half a year is a choice: nearly everything is written in the days after a post,
// and what comes later pays one move.
func Default() Settings {
	const day = 24 * time.Hour
	return Settings{OutboxArchiveAfter: Span(7 * day), OutboxArchiveKeep: Span(90 * day), CommentArchiveAfter: Span(180 * day)}
}

// Setting is one of the Settings, by its name.
type Setting struct {
	Name, Help string
	span       func(*Settings) *Span
	text       func(*Settings) *string
}

// All are the settings in the order in which they are shown.
var All = []Setting{
	{Name: "outbox_archive_after", Help: "a range of the outbox moves to the archive so long after the last of it was published; 1m or more", span: func(s *Settings) *Span { return &s.OutboxArchiveAfter }},
	{Name: "outbox_archive_keep", Help: "a range is dropped so long after it moved; 0s: never. No less than outbox_archive_after, and more than NATS_MAX_AGE", span: func(s *Settings) *Span { return &s.OutboxArchiveKeep }},
	{Name: "outbox_archive_export_url", Help: "where ranges are exported to before they are dropped, file:///DIR or s3://BUCKET?region=R&endpoint=E; empty: they are dropped without", text: func(s *Settings) *string { return &s.OutboxExportURL }},
	{Name: "comment_archive_after", Help: "a thread moves so long after anything in it was written; 0s: none does, else 1h or more", span: func(s *Settings) *Span { return &s.CommentArchiveAfter }},
	{Name: "comment_history_after", Help: "histories of children that are deleted or erased are purged so long after; 0s: never, else 1h or more", span: func(s *Settings) *Span { return &s.CommentHistoryAfter }},
	{Name: "follow_history_after", Help: "histories of edges that are removed are purged so long after; 0s: never, else 1h or more", span: func(s *Settings) *Span { return &s.FollowHistoryAfter }},
	{Name: "threads_after", Help: "settings of threads that are the defaults again are purged so long after; 0s: never, else 1h or more", span: func(s *Settings) *Span { return &s.ThreadsAfter }},
	{Name: "comment_keys_keep", Help: "idempotency keys of creates are purged when they are so old; 0s: never, else 1h or more", span: func(s *Settings) *Span { return &s.CommentKeysKeep }},
}

// Of returns the setting's value as text.
func (t Setting) Of(s Settings) string {
	if t.span != nil {
		return time.Duration(*t.span(&s)).String()
	}
	return *t.text(&s)
}

// Set changes the setting.
func (t Setting) Set(s *Settings, value string) error {
	if t.span == nil {
		*t.text(s) = value
		return nil
	}
	if err := t.span(s).UnmarshalText([]byte(value)); err != nil {
		return fmt.Errorf("%s is %q: want a duration such as 2160h, or 0s", t.Name, value)
	}
	return nil
}

// Validate reports every value out of bounds.
func (s Settings) Validate() error {
	var errs []error
	if time.Duration(s.OutboxArchiveAfter) < time.Minute {
		errs = append(errs, fmt.Errorf("outbox_archive_after is %s: want 1m or more", time.Duration(s.OutboxArchiveAfter)))
	}
	if s.OutboxArchiveKeep < 0 || s.OutboxArchiveKeep > 0 && s.OutboxArchiveKeep < s.OutboxArchiveAfter {
		errs = append(errs, fmt.Errorf("outbox_archive_keep is %s: want 0s, or no less than outbox_archive_after, %s", time.Duration(s.OutboxArchiveKeep), time.Duration(s.OutboxArchiveAfter)))
	}
	if err := (coldstore.Config{URL: s.OutboxExportURL}).Validate(); err != nil {
		errs = append(errs, err)
	}
	for _, t := range All[3:] {
		if after := time.Duration(*t.span(&s)); after != 0 && after < time.Hour {
			errs = append(errs, fmt.Errorf("%s is %s: want 1h or more, or 0s", t.Name, after))
		}
	}
	return errors.Join(errs...)
}

// Outlives reports an archive that is dropped before the stream's messages of the same time, of which maxAge is the age; 0 is for ever.
// tidings repair stream cannot tell such messages from those of writes that were lost.
func (s Settings) Outlives(maxAge time.Duration) error {
	keep := time.Duration(s.OutboxArchiveKeep)
	if keep == 0 || maxAge > 0 && keep >= maxAge {
		return nil
	}
	return fmt.Errorf("outbox_archive_keep is %s and NATS_MAX_AGE %s (0s: for ever): archived rows are to outlive the stream's messages", keep, maxAge)
}

// stored is the one object of archive_settings.
type stored struct {
	Name     string          `json:"name"` // installation
	Settings json.RawMessage `json:"settings"`
	Reason   string          `json:"reason,omitempty"`
}

const (
	installation = 0 // the object's tenant
	objectName   = "installation"
)

var table = versioned.New[stored](versioned.Definition{Table: "archive_settings", Sequence: "object_version_id", Key: []versioned.Column{{Name: "name", Type: "text"}}})

// Changed says who set the Settings last, when and why; it is zero where nobody has.
type Changed struct {
	By     string    `json:"by,omitempty"`
	At     time.Time `json:"at,omitzero"`
	Reason string    `json:"reason,omitempty"`
}

// Read returns the settings that hold now. The pool is one of the truth and acts as the system role.
func Read(ctx context.Context, truth *pgxpool.Pool) (s Settings, last Changed, err error) {
	err = postgres.InTx(ctx, truth, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) (err error) {
		s, last, err = read(ctx, tx)
		return err
	})
	if err != nil {
		return s, last, fmt.Errorf("read the archive's settings: %w", err)
	}
	return s, last, nil
}

// Current reads the settings anew whenever it is called: what Jobs go by.
func Current(truth *pgxpool.Pool) func(context.Context) (Settings, error) {
	return func(ctx context.Context) (Settings, error) {
		s, _, err := Read(ctx, truth)
		return s, err
	}
}

func read(ctx context.Context, tx pgx.Tx) (s Settings, last Changed, err error) {
	v, err := table.Get(ctx, tx, installation, versioned.Key{objectName})
	if errors.Is(err, versioned.ErrNotFound) {
		return Default(), last, nil
	}
	if err != nil {
		return s, last, err
	}
	return s, Changed{v.Metadata.CreatedBy, v.Metadata.LastUpdateTime, v.Object.Reason}, json.Unmarshal(v.Object.Settings, &s)
}

// Write has change change the settings as they are now, and makes them what holds from the next run of each job on. Every version stays, with who made it
// and why. It returns the error of change, or what is out of bounds.
func Write(ctx context.Context, truth *pgxpool.Pool, actor, reason string, change func(*Settings) error) (s Settings, err error) {
	err = postgres.InTx(ctx, truth, pgx.TxOptions{}, func(tx pgx.Tx) error {
		one := versioned.Change[stored]{TenantID: installation, Object: stored{Name: objectName, Reason: reason}, By: actor}
		if err := table.Lock(ctx, tx, []versioned.Change[stored]{one}); err != nil {
			return err
		}
		if s, _, err = read(ctx, tx); err != nil {
			return err
		}
		if err := change(&s); err != nil {
			return err
		}
		if err := s.Validate(); err != nil {
			return err
		}
		if one.Object.Settings, err = json.Marshal(s); err != nil {
			return err
		}
		_, err := table.Upsert(ctx, tx, []versioned.Change[stored]{one})
		return err
	})
	return s, err
}
