package coldstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path"
	"strings"

	"github.com/google/uuid"
)

// files stores objects in a directory. os.Root keeps every key inside it.
type files struct {
	root   *os.Root
	prefix string
}

func openFiles(u *url.URL) (*files, error) {
	root, err := os.OpenRoot(u.Path)
	if err != nil {
		return nil, err
	}
	return &files{root, u.Query().Get("prefix")}, nil
}

func (f *files) close() error { return f.root.Close() }

// file is written next to its final place, because the directory of temporary files may be on
// another file system.
type file struct {
	*os.File
	of         *files
	temp, name string
	ctx        context.Context
}

func (f *files) create(ctx context.Context, key, _ string) (upload, error) {
	name := f.prefix + key
	if err := f.root.MkdirAll(path.Dir(name), 0o700); err != nil {
		return nil, err
	}
	temp := name + "." + uuid.NewString() + ".tmp"
	w, err := f.root.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	return &file{w, f, temp, name, ctx}, nil
}

func (w *file) commit() error {
	err := errors.Join(w.ctx.Err(), w.Sync(), w.Close())
	if err == nil {
		err = w.of.root.Rename(w.temp, w.name)
	}
	if err != nil {
		w.abort()
		return err
	}
	return w.of.settle(path.Dir(w.name))
}

func (w *file) abort() {
	_ = w.Close()                // it may be closed already
	_ = w.of.root.Remove(w.temp) // it may be renamed already
}

// settle makes the names in a directory, and the directory's own name, survive a power loss.
func (f *files) settle(dir string) error {
	for ; ; dir = path.Dir(dir) {
		d, err := f.root.Open(dir)
		if err != nil {
			return err
		}
		if err := errors.Join(d.Sync(), d.Close()); err != nil {
			return fmt.Errorf("sync %s: %w", dir, err)
		}
		if dir == "." {
			return nil
		}
	}
}

func (f *files) open(_ context.Context, key string) (io.ReadCloser, error) {
	return f.root.Open(f.prefix + key)
}

func (f *files) copy(ctx context.Context, to, from string) error {
	r, err := f.open(ctx, from)
	if err != nil {
		return err
	}
	defer r.Close()
	w, err := f.create(ctx, to, "")
	if err != nil {
		return err
	}
	if _, err := io.Copy(w, r); err != nil {
		w.abort()
		return err
	}
	return w.commit()
}

func (f *files) list(ctx context.Context, prefix string) (keys []string, err error) {
	err = fs.WalkDir(f.root.FS(), path.Clean(f.prefix+path.Dir(prefix+"x")), func(name string, d fs.DirEntry, err error) error {
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if key, ok := strings.CutPrefix(name, f.prefix); ok && err == nil && !d.IsDir() && strings.HasPrefix(key, prefix) {
			keys = append(keys, key)
		}
		return ctx.Err()
	})
	return keys, err
}

func (f *files) delete(ctx context.Context, keys []string) error {
	for _, key := range keys {
		if err := f.root.Remove(f.prefix + key); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return ctx.Err()
}

// uploads returns none: list shows temporary files too.
func (*files) uploads(context.Context, string) ([]string, error) { return nil, nil }
func (*files) cancel(context.Context, []string) error            { return nil }

func (f *files) forget(dir string) error {
	if err := f.root.RemoveAll(f.prefix + dir); err != nil {
		return err
	}
	if err := f.settle(path.Dir(f.prefix + dir)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
