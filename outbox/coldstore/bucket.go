package coldstore

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// objectTimeout bounds the write, read or removal of one object, so a store that hangs returns an
// error.
const objectTimeout = 10 * time.Minute

// place stores objects: files in a directory, or objects in an S3 bucket. A missing object is
// fs.ErrNotExist. It is safe for concurrent use.
type place interface {
	create(ctx context.Context, key, contentType string) (upload, error)
	open(ctx context.Context, key string) (io.ReadCloser, error)
	copy(ctx context.Context, to, from string) error
	list(ctx context.Context, prefix string) ([]string, error)    // the keys that begin with prefix
	delete(ctx context.Context, keys []string) error              // missing keys are no error
	uploads(ctx context.Context, prefix string) ([]string, error) // the keys of begun uploads, which list does not show
	cancel(ctx context.Context, keys []string) error              // ends these uploads: none of them becomes an object
	forget(dir string) error                                      // removes the remains of a directory whose keys are deleted
	close() error
}

// upload is an object being written. It does not exist before commit. Call either abort or commit
// to end it; abort after commit does nothing.
type upload interface {
	io.Writer
	commit() error // afterward the object survives a power loss
	abort()
}

// bucket is a place with timeouts.
type bucket struct{ place }

// parameters are the allowed query parameters of a URL, by scheme.
var parameters = map[string][]string{"file": {"prefix"}, "s3": {"prefix", "region", "endpoint", "use_path_style"}}

// parseURL parses and validates the URL of a place. The URL is stored in the database and shown, so
// it must not contain secrets.
func parseURL(rawURL string) (*url.URL, error) {
	u, err := url.Parse(rawURL)
	switch {
	case err != nil:
		return nil, errors.New("it is not a URL") // err quotes the whole URL
	case u.User != nil:
		return nil, errors.New("it has a user or a password: put S3 credentials into the environment (AWS_ACCESS_KEY_ID and so on)")
	case !(u.Scheme == "file" && u.Host == "" && filepath.IsAbs(u.Path)) &&
		!(u.Scheme == "s3" && u.Host != "" && strings.Trim(u.Path, "/") == ""):
		return nil, fmt.Errorf("it is %q: want file:///DIR or s3://BUCKET?region=REGION", rawURL)
	}
	for name := range u.Query() {
		if !slices.Contains(parameters[u.Scheme], name) {
			return nil, fmt.Errorf("its parameter %q is unknown; the known ones are %s", name, strings.Join(parameters[u.Scheme], ", "))
		}
	}
	if p := u.Query().Get("prefix"); p != "" && (!strings.HasSuffix(p, "/") || !fs.ValidPath(strings.TrimSuffix(p, "/"))) {
		return nil, fmt.Errorf("its prefix is %q: want DIR/ or DIR/DIR/", p)
	}
	return u, nil
}

// openBucket opens the place of a URL: file:///DIR, which must exist, or s3://BUCKET?region=R. Both
// accept prefix=P/.
func openBucket(rawURL string) (*bucket, error) {
	u, err := parseURL(rawURL)
	if err != nil {
		return nil, fmt.Errorf("open the cold store: %w", err)
	}
	var p place
	if u.Scheme == "file" {
		p, err = openFiles(u)
	} else {
		p, err = openS3(u)
	}
	if err != nil {
		return nil, fmt.Errorf("open the cold store %s: %w", rawURL, err)
	}
	return &bucket{p}, nil
}

// object is a file being written, with its size and hash.
type object struct {
	key    string
	w      upload
	cancel context.CancelFunc
	sum    hash.Hash
	size   int64
}

func (b *bucket) create(ctx context.Context, key, contentType string) (*object, error) {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	w, err := b.place.create(ctx, key, contentType)
	if err != nil {
		cancel()
		return nil, fmt.Errorf("write %s: %w", key, err)
	}
	return &object{key: key, w: w, cancel: cancel, sum: sha256.New()}, nil
}

func (o *object) Write(p []byte) (int, error) {
	n, err := o.w.Write(p)
	o.sum.Write(p[:n])
	o.size += int64(n)
	if err != nil {
		return n, fmt.Errorf("write %s: %w", o.key, err)
	}
	return n, nil
}

// abort removes every part of the object. It does nothing after commit.
func (o *object) abort() {
	o.cancel()
	o.w.abort()
}

func (o *object) commit() error {
	err := o.w.commit()
	o.cancel()
	if err != nil {
		return fmt.Errorf("write %s: %w", o.key, err)
	}
	return nil
}

// put writes a small object.
func (b *bucket) put(ctx context.Context, key, contentType string, content []byte) error {
	o, err := b.create(ctx, key, contentType)
	if err != nil {
		return err
	}
	if _, err := o.Write(content); err != nil {
		o.abort()
		return err
	}
	return o.commit()
}

// read calls fn with the content of an object. A missing object is ErrDamaged.
func (b *bucket) read(ctx context.Context, key string, fn func(r io.Reader) error) error {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	r, err := b.open(ctx, key)
	if err == nil {
		defer r.Close() // hashes verify the content
		err = fn(r)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s does not exist: %w", key, ErrDamaged)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", key, err)
	}
	return nil
}

// copy copies an object.
func (b *bucket) copy(ctx context.Context, to, from string) error {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	if err := b.place.copy(ctx, to, from); err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	return nil
}

// list returns the keys that begin with prefix.
func (b *bucket) list(ctx context.Context, prefix string) ([]string, error) {
	return keys(ctx, "list", prefix, b.place.list)
}

// unfinished returns the keys of the uploads that begin with prefix.
func (b *bucket) unfinished(ctx context.Context, prefix string) ([]string, error) {
	return keys(ctx, "list the uploads to", prefix, b.uploads)
}

func keys(ctx context.Context, what, prefix string, list func(ctx context.Context, prefix string) ([]string, error)) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	all, err := list(ctx, prefix)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", what, prefix, err)
	}
	return all, nil
}

// exportKey matches the keys of an export's files: its directory, which ends with its id.
var exportKey = regexp.MustCompile(`^([0-9]{4}-[0-9]{2}/([0-9]{8}t[0-9]{6}[.][0-9]{6}z-[a-z0-9]+))/`)

// exports returns the directories of exports that have objects or begun uploads, by the id of the
// export.
func (b *bucket) exports(ctx context.Context) (map[string]string, error) {
	begun, err := b.unfinished(ctx, "")
	if err != nil {
		return nil, err
	}
	keys, err := b.list(ctx, "")
	if err != nil {
		return nil, err
	}
	dirs := make(map[string]string)
	for _, key := range append(keys, begun...) {
		if m := exportKey.FindStringSubmatch(key); m != nil {
			dirs[m[2]] = m[1]
		}
	}
	return dirs, nil
}

// remove deletes everything below a directory, and returns the number of objects deleted. Uploads
// end first: one that was completed before is listed as an object.
func (b *bucket) remove(ctx context.Context, dir string) (int, error) {
	begun, err := b.unfinished(ctx, dir+"/")
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	if err := b.cancel(ctx, begun); err != nil {
		return 0, fmt.Errorf("end the uploads to %s: %w", dir, err)
	}
	keys, err := b.list(ctx, dir+"/")
	if err != nil {
		return 0, err
	}
	if err := b.delete(ctx, keys); err != nil {
		return 0, fmt.Errorf("delete %s: %w", dir, err)
	}
	if err := b.forget(dir); err != nil {
		return 0, fmt.Errorf("delete %s: %w", dir, err)
	}
	return len(keys), nil
}
