package upkeep

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/tidings/tidings/internal/postgres"
	"github.com/tidings/tidings/internal/versioned"
	"github.com/tidings/tidings/outbox/coldstore"
)

// Span is a time.Duration that is written as text: 168h0m0s.
type Span time.Duration

// MarshalText writes the duration as time.Duration does.
func (s Span) MarshalText() ([]byte, error) { return []byte(time.Duration(s).String()), nil }

// UnmarshalText parses a duration as time.ParseDuration does.
func (s *Span) UnmarshalText(b []byte) error {
	d, err := time.ParseDuration(string(b))
	*s = Span(d)
	return err
}

// Settings say what the archiver archives and drops, and when. They are in the database of the
// truth, so the archiver and every command use the same ones.
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

// Default returns the settings of a new installation. Half a year for threads is a choice: people
// write nearly all comments in the days after a post. A later comment costs one move of the thread.
func Default() Settings {
	const day = 24 * time.Hour
	return Settings{OutboxArchiveAfter: Span(7 * day), OutboxArchiveKeep: Span(90 * day), CommentArchiveAfter: Span(180 * day)}
}

// Setting is one of the Settings, with its name.
type Setting struct {
	Name, Help string
	span       func(*Settings) *Span
	text       func(*Settings) *string
}

// All are the settings in the order in which commands show them.
var All = []Setting{
	{Name: "outbox_archive_after",
		Help: "time from the publish of a range's last message to its move into the archive; 1m or more",
		span: func(s *Settings) *Span { return &s.OutboxArchiveAfter }},
	{Name: "outbox_archive_keep",
		Help: "time from a range's move to its deletion; 0s: never; at least outbox_archive_after and NATS_MAX_AGE",
		span: func(s *Settings) *Span { return &s.OutboxArchiveKeep }},
	{Name: "outbox_archive_export_url",
		Help: "target of the export before a range's deletion, file:///DIR or s3://BUCKET?region=R&endpoint=E; empty: no export",
		text: func(s *Settings) *string { return &s.OutboxExportURL }},
	{Name: "comment_archive_after", Help: "time from the last write in a thread until it is shelved; 0s: never, else 1h or more",
		span: func(s *Settings) *Span { return &s.CommentArchiveAfter }},
	{Name: "comment_history_after",
		Help: "time from a child's deletion or erasure to the purge of its history; 0s: never, else 1h or more",
		span: func(s *Settings) *Span { return &s.CommentHistoryAfter }},
	{Name: "follow_history_after", Help: "time from an edge's removal to the purge of its history; 0s: never, else 1h or more",
		span: func(s *Settings) *Span { return &s.FollowHistoryAfter }},
	{Name: "threads_after",
		Help: "time from a thread's return to default settings to the purge of the settings; 0s: never, else 1h or more",
		span: func(s *Settings) *Span { return &s.ThreadsAfter }},
	{Name: "comment_keys_keep", Help: "age at which idempotency keys of creates are purged; 0s: never, else 1h or more",
		span: func(s *Settings) *Span { return &s.CommentKeysKeep }},
}

// Of returns the value of the setting in s as text.
func (t Setting) Of(s Settings) string {
	if t.span != nil {
		return time.Duration(*t.span(&s)).String()
	}
	return *t.text(&s)
}

// Set changes the setting in s. It returns an error if value is not a duration where one is wanted.
func (t Setting) Set(s *Settings, value string) error {
	if t.span == nil {
		*t.text(s) = value
		return nil
	}
	if err := t.span(s).UnmarshalText([]byte(value)); err != nil {
		return fmt.Errorf("%s is %q: want a duration, for example 2160h, or 0s", t.Name, value)
	}
	return nil
}

// Validate returns an error that lists every value out of bounds.
func (s Settings) Validate() error {
	var errs []error
	if time.Duration(s.OutboxArchiveAfter) < time.Minute {
		errs = append(errs, fmt.Errorf("outbox_archive_after is %s: want 1m or more", time.Duration(s.OutboxArchiveAfter)))
	}
	if s.OutboxArchiveKeep < 0 || s.OutboxArchiveKeep > 0 && s.OutboxArchiveKeep < s.OutboxArchiveAfter {
		errs = append(errs, fmt.Errorf("outbox_archive_keep is %s: want 0s, or at least outbox_archive_after (%s)",
			time.Duration(s.OutboxArchiveKeep), time.Duration(s.OutboxArchiveAfter)))
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

// KeepsForStreams returns an error if the archive drops rows before the streams drop the messages
// of the same time. Streams drop messages at the age maxAge; 0 means never. Without those rows,
// `tidings repair stream` cannot tell such messages from those of lost writes.
func (s Settings) KeepsForStreams(maxAge time.Duration) error {
	keep := time.Duration(s.OutboxArchiveKeep)
	if keep == 0 || maxAge > 0 && keep >= maxAge {
		return nil
	}
	return fmt.Errorf("outbox_archive_keep is %s and NATS_MAX_AGE is %s (0s: forever): "+
		"want archived rows to outlive the messages of the streams", keep, maxAge)
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

var table = versioned.New[stored](versioned.Definition{Table: "archive_settings", Sequence: "object_version_id",
	Key: []versioned.Column{{Name: "name", Type: "text"}}})

// Changed says who changed the Settings last, when and why. It is zero before the first change.
type Changed struct {
	By     string    `json:"by,omitempty"`
	At     time.Time `json:"at,omitzero"`
	Reason string    `json:"reason,omitempty"`
}

// Read returns the current settings. The pool is one of the truth and acts as the system role.
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

// Current returns a function that reads the settings at each call. Jobs use it.
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

// Write calls change with the current settings and stores the result, which every job uses from its
// next run on. Every version is kept, with its author and reason. Write returns the error of
// change, or an error that lists every value out of bounds.
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
