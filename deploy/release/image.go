package main

import (
	"bytes"
	"encoding/pem"
	"io"
	"os"
	"path/filepath"
	"slices"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/crypto/x509roots/fallback/bundle"
)

// image has the files of one platform of the image.
type image struct {
	platform string
	files    []file
}

// writeImage writes the image of all platforms as a tar of an OCI layout. It is the image of
// deploy/Dockerfile, without a container engine.
func (r *release) writeImage(images []image) error {
	if len(images) == 0 {
		return nil
	}
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	for _, i := range images {
		platform, err := v1.ParsePlatform(i.platform)
		if err != nil {
			return err
		}
		img, err := r.image(*platform, append(slices.Clone(i.files), file{name: "etc/ssl/certs/ca-certificates.crt", data: authorities()}))
		if err != nil {
			return err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: platform}})
	}
	dir := filepath.Join(r.source, ".image")
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	// podman and skopeo read the first name, Docker and containerd the second.
	if err := path.AppendIndex(index, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": r.version,
		"io.containerd.image.name": "docker.io/library/tidings:" + r.version})); err != nil {
		return err
	}
	files, err := readFiles(dir, "")
	if err != nil {
		return err
	}
	var archive bytes.Buffer
	if err := writeTar(&archive, r.when, files); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.dist, "tidings-"+r.version+"-image.tar"), archive.Bytes(), 0o644)
}

// image returns the image of a platform, with the settings of deploy/Dockerfile.
func (r *release) image(platform v1.Platform, files []file) (v1.Image, error) {
	var data bytes.Buffer
	if err := writeTar(&data, r.when, files); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data.Bytes())), nil },
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
	if err != nil {
		return nil, err
	}
	created := v1.History{Created: v1.Time{Time: r.when}, CreatedBy: "make release"}
	img, err := mutate.Append(mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON),
		mutate.Addendum{Layer: layer, History: created})
	if err != nil {
		return nil, err
	}
	config, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.Created, config.OS, config.Architecture = created.Created, platform.OS, platform.Architecture
	config.Config = v1.Config{User: "65532:65532", Env: []string{"PATH=/bin", "LOG_FORMAT=json"}, Cmd: []string{"/bin/tidings", "--help"},
		WorkingDir: "/", Labels: r.labels()}
	return mutate.ConfigFile(img, config)
}

func (r *release) labels() map[string]string {
	const prefix = "org.opencontainers.image."
	return map[string]string{
		prefix + "title":       "Tidings",
		prefix + "description": "A social write model with an event backbone: API, relay, consumers and commands",
		prefix + "source":      "https://github.com/tidings/tidings",
		prefix + "licenses":    "Apache-2.0",
		prefix + "version":     r.version,
		prefix + "revision":    r.revision,
	}
}

// authorities returns Mozilla's certificate authorities as PEM, without those that Mozilla only
// trusts for certificates of before a date: the file cannot hold that date.
func authorities() []byte {
	var all bytes.Buffer
	for root := range bundle.Roots() {
		if root.Constraint == nil {
			all.Write(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: root.Certificate}))
		}
	}
	return all.Bytes()
}
