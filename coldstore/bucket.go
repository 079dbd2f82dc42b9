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
	"os"
	"path"
	"path/filepath"
	"time"

	"gocloud.dev/blob"
	"gocloud.dev/blob/fileblob"
	"gocloud.dev/blob/s3blob"
	"gocloud.dev/gcerrors"
)

// objectTimeout bounds the writing, reading or removing of one object: a store that hangs is an error.
const objectTimeout = 10 * time.Minute

// bucket is a place for files.
type bucket struct {
	*blob.Bucket
	dir string // of files on this machine, "" otherwise
}

// parseURL reads where a place is. A URL is kept in the database and shown, so it holds no secrets.
func parseURL(rawURL string) (*url.URL, error) {
	u, err := url.Parse(rawURL)
	switch {
	case err != nil:
		return nil, errors.New("it is no URL") // err repeats it whole
	case u.User != nil:
		return nil, errors.New("it has a user or a password: those of S3 are taken from the environment (AWS_ACCESS_KEY_ID and so on)")
	case u.Scheme == fileblob.Scheme && u.Host == "" && filepath.IsAbs(u.Path), u.Scheme == s3blob.Scheme && u.Host != "":
		return u, nil
	}
	return nil, fmt.Errorf("it is %q: want file:///DIR or s3://BUCKET?region=REGION", rawURL)
}

// openBucket opens the place that a URL names: file:///DIR, which must exist, or s3://BUCKET?region=R. Both take prefix=P/.
func openBucket(ctx context.Context, rawURL string) (*bucket, error) {
	u, err := parseURL(rawURL)
	if err != nil {
		return nil, fmt.Errorf("open the cold store: %w", err)
	}
	var mux blob.URLMux
	// A file is written beside its place, which may be another file system than the one of temporary files.
	mux.RegisterBucket(fileblob.Scheme, &fileblob.URLOpener{Options: fileblob.Options{NoTempDir: true, Metadata: fileblob.MetadataDontWrite, DirFileMode: 0o700}})
	mux.RegisterBucket(s3blob.Scheme, &s3blob.URLOpener{})
	if q := u.Query(); u.Scheme == s3blob.Scheme && !q.Has("response_checksum_validation") {
		q.Set("response_checksum_validation", "when_required") // the hashes are ours; else it is logged of each file that S3 has none
		u.RawQuery = q.Encode()
	}
	b := &bucket{}
	if u.Scheme == fileblob.Scheme {
		b.dir = filepath.Join(u.Path, u.Query().Get("prefix"))
	}
	if b.Bucket, err = mux.OpenBucketURL(ctx, u); err != nil {
		return nil, fmt.Errorf("open the cold store %s: %w", rawURL, err)
	}
	return b, nil
}

// object is a file being written. It is not there before commit.
type object struct {
	b      *bucket
	key    string
	w      *blob.Writer
	cancel context.CancelFunc
	sum    hash.Hash
	size   int64
}

func (b *bucket) create(ctx context.Context, key, contentType string) (*object, error) {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	w, err := b.NewWriter(ctx, key, &blob.WriterOptions{ContentType: contentType})
	if err != nil {
		cancel()
		return nil, fmt.Errorf("write %s: %w", key, err)
	}
	return &object{b: b, key: key, w: w, cancel: cancel, sum: sha256.New()}, nil
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
	o.cancel()      // a writer whose context has ended keeps nothing
	_ = o.w.Close() // says just that
}

func (o *object) commit() error {
	err := o.w.Close()
	o.cancel()
	if err != nil {
		return fmt.Errorf("write %s: %w", o.key, err)
	}
	return o.b.settle(o.key)
}

// settle has an object survive a power loss. S3 sees to that itself; of files, contents and names are still in memory.
func (b *bucket) settle(key string) error {
	if b.dir == "" {
		return nil
	}
	if err := sync(filepath.Join(b.dir, key)); err != nil {
		return fmt.Errorf("sync %s: %w", key, err)
	}
	for dir := path.Dir(key); ; dir = path.Dir(dir) {
		if err := sync(filepath.Join(b.dir, dir)); err != nil {
			return fmt.Errorf("sync %s: %w", dir, err)
		}
		if dir == "." {
			return nil
		}
	}
}

func sync(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
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
	r, err := b.NewReader(ctx, key, nil)
	if gcerrors.Code(err) == gcerrors.NotFound {
		return fmt.Errorf("%s is not there: %w", key, ErrDamaged)
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", key, err)
	}
	defer r.Close() // what was read is checked by its hash
	if err := fn(r); err != nil {
		return fmt.Errorf("read %s: %w", key, err)
	}
	return nil
}

// list returns the keys that begin with a prefix.
func (b *bucket) list(ctx context.Context, prefix string) (keys []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	all := b.List(&blob.ListOptions{Prefix: prefix})
	for {
		o, err := all.Next(ctx)
		if errors.Is(err, io.EOF) {
			return keys, nil
		}
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", prefix, err)
		}
		keys = append(keys, o.Key)
	}
}

// remove deletes everything below a directory, and returns how many objects that were.
func (b *bucket) remove(ctx context.Context, dir string) (int, error) {
	keys, err := b.list(ctx, dir+"/")
	if err != nil {
		return 0, err
	}
	for _, key := range keys {
		ctx, cancel := context.WithTimeout(ctx, objectTimeout)
		err := b.Delete(ctx, key)
		cancel()
		if err != nil && gcerrors.Code(err) != gcerrors.NotFound {
			return 0, fmt.Errorf("delete %s: %w", key, err)
		}
	}
	if b.dir == "" {
		return len(keys), nil
	}
	// Listing passes over what it cannot read; this does not. The directory goes too.
	where := filepath.Join(b.dir, dir)
	err = os.RemoveAll(where)
	if serr := sync(filepath.Dir(where)); !errors.Is(serr, fs.ErrNotExist) {
		err = errors.Join(err, serr)
	}
	if err != nil {
		return 0, fmt.Errorf("delete %s: %w", dir, err)
	}
	return len(keys), nil
}
