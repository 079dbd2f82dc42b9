// How the generator of Hey API makes this package's methods and types, and those of your own kinds (docs/typescript.md).
export const plugins = [
  '@hey-api/typescript',
  {
    name: '@hey-api/sdk',
    operations: { strategy: 'single', containerName: 'Operations', methods: 'instance' },
    responseStyle: 'data',
  },
  { name: '@hey-api/client-fetch', throwOnError: true },
];

export const output = { module: { extension: '.js' } };

export default { output, plugins };
