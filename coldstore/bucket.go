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
	"slices"
	"strings"
	"time"
)

// objectTimeout bounds the writing, reading or removing of one object: a store that hangs is an error.
const objectTimeout = 10 * time.Minute

// place is where objects are: files in a directory, or in a bucket of S3. An object that is not there is fs.ErrNotExist. It may be used from
// several goroutines.
type place interface {
	create(ctx context.Context, key, contentType string) (upload, error)
	open(ctx context.Context, key string) (io.ReadCloser, error)
	copy(ctx context.Context, to, from string) error
	list(ctx context.Context, prefix string) ([]string, error) // the keys that begin with prefix
	delete(ctx context.Context, keys []string) error           // those that are gone already are no error
	forget(dir string) error                                   // what is left of a directory whose keys are deleted
	close() error
}

// upload is an object being written, which is not there before commit. One of abort and commit ends it; abort after commit does nothing.
type upload interface {
	io.Writer
	commit() error // the object survives a power loss
	abort()
}

// bucket is a place with limits of time.
type bucket struct{ place }

// The query parameters that a URL may have, by its scheme.
var parameters = map[string][]string{"file": {"prefix"}, "s3": {"prefix", "region", "endpoint", "use_path_style"}}

// parseURL reads where a place is. A URL is kept in the database and shown, so it holds no secrets.
func parseURL(rawURL string) (*url.URL, error) {
	u, err := url.Parse(rawURL)
	switch {
	case err != nil:
		return nil, errors.New("it is no URL") // err repeats it whole
	case u.User != nil:
		return nil, errors.New("it has a user or a password: those of S3 are taken from the environment (AWS_ACCESS_KEY_ID and so on)")
	case !(u.Scheme == "file" && u.Host == "" && filepath.IsAbs(u.Path)) && !(u.Scheme == "s3" && u.Host != "" && strings.Trim(u.Path, "/") == ""):
		return nil, fmt.Errorf("it is %q: want file:///DIR or s3://BUCKET?region=REGION", rawURL)
	}
	for name := range u.Query() {
		if !slices.Contains(parameters[u.Scheme], name) {
			return nil, fmt.Errorf("its parameter %q is unknown: want some of %s", name, strings.Join(parameters[u.Scheme], ", "))
		}
	}
	if p := u.Query().Get("prefix"); p != "" && (!strings.HasSuffix(p, "/") || !fs.ValidPath(strings.TrimSuffix(p, "/"))) {
		return nil, fmt.Errorf("its prefix is %q: want DIR/ or DIR/DIR/", p)
	}
	return u, nil
}

// openBucket opens the place that a URL names: file:///DIR, which must exist, or s3://BUCKET?region=R. Both take prefix=P/.
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

// abort leaves nothing of the object. It does nothing after commit.
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

// read calls fn with the content of an object. One that is not there is ErrDamaged.
func (b *bucket) read(ctx context.Context, key string, fn func(r io.Reader) error) error {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	r, err := b.open(ctx, key)
	if err == nil {
		defer r.Close() // what was read is checked by its hash
		err = fn(r)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s is not there: %w", key, ErrDamaged)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", key, err)
	}
	return nil
}

// copy makes an object of another one.
func (b *bucket) copy(ctx context.Context, to, from string) error {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	if err := b.place.copy(ctx, to, from); err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	return nil
}

// list returns the keys that begin with a prefix.
func (b *bucket) list(ctx context.Context, prefix string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	keys, err := b.place.list(ctx, prefix)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", prefix, err)
	}
	return keys, nil
}

// remove deletes everything below a directory, and returns how many objects that were.
func (b *bucket) remove(ctx context.Context, dir string) (int, error) {
	keys, err := b.list(ctx, dir+"/")
	if err != nil {
		return 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	if err := b.delete(ctx, keys); err != nil {
		return 0, fmt.Errorf("delete %s: %w", dir, err)
	}
	if err := b.forget(dir); err != nil {
		return 0, fmt.Errorf("delete %s: %w", dir, err)
	}
	return len(keys), nil
}
