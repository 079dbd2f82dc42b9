package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// file is one file of an archive or of the image.
type file struct {
	name       string
	data       []byte
	executable bool
	link       string // the target of a symbolic link, which has no data
}

// writeTar writes the files and their folders in the order of their names, all with one time and no
// owner, so the same files give the same bytes.
func writeTar(w io.Writer, when time.Time, files []file) error {
	out, folders := tar.NewWriter(w), map[string]bool{".": true}
	write := func(h tar.Header, data []byte) error {
		h.ModTime, h.Format = when, tar.FormatUSTAR
		err := out.WriteHeader(&h)
		if err == nil {
			_, err = out.Write(data)
		}
		return err
	}
	for _, f := range slices.SortedFunc(slices.Values(files), func(a, b file) int { return strings.Compare(a.name, b.name) }) {
		var above []string
		for dir := path.Dir(f.name); !folders[dir]; dir = path.Dir(dir) {
			folders[dir] = true
			above = append([]string{dir}, above...)
		}
		for _, dir := range above {
			if err := write(tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755}, nil); err != nil {
				return err
			}
		}
		h := tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: 0o644, Size: int64(len(f.data))}
		if f.executable {
			h.Mode = 0o755
		}
		if f.link != "" {
			h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, f.link, 0o777
		}
		if err := write(h, f.data); err != nil {
			return err
		}
	}
	return out.Close()
}

// writeArchive writes a compressed tar into dist.
func (r *release) writeArchive(name string, files []file) error {
	var archive bytes.Buffer
	zip := gzip.NewWriter(&archive)
	if err := cmp.Or(writeTar(zip, r.when, files), zip.Close()); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.dist, name), archive.Bytes(), 0o644)
}

// below returns the files in a folder.
func below(folder string, files []file) []file {
	moved := slices.Clone(files)
	for i := range moved {
		moved[i].name = folder + "/" + moved[i].name
	}
	return moved
}

// readFiles returns the files below dir, named below folder. It reads the targets of links.
func readFiles(dir, folder string) (files []file, err error) {
	err = filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		files = append(files, file{name: filepath.ToSlash(filepath.Join(folder, name)), data: data})
		return err
	})
	return files, err
}
